"""Families beyond the plain ones against `transformers`: states, attentions, logits, path sums.

Skips where torch or transformers is not installed.
"""

import json
import re
import warnings

import jax
import numpy as np
import pytest

from tests.support.refusals import is_refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles import architectures

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.pretrained.weights import CheckpointWeights
from tests.oracles.checkpoint_arrays import example_inputs, hidden_states, largest_difference
from tests.support.marks import full_but, full_if

TOLERANCE = 1e-5
OTHER_FORMS = [name for name in architectures.FORMS if "-" in name]  # of families that have one
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", full_if(architectures.FORMS, *OTHER_FORMS))
def test_states_attentions_and_logits(name, tmp_path):
    case = architectures.FORMS[name]
    model = architectures.build(case)
    architectures.save(model, tmp_path, case.saved)
    if case.saved == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    arguments = architectures.inputs(model, pad_left=True)
    config, params = pretrained.load(tmp_path)
    x, mask = example_inputs(config, arguments)
    trace = jax.jit(jax.vmap(lambda x, m: rc.apply(params, x, config, mask=m)))(x, mask)
    results = {"hidden": hidden_states(trace, config), "attention": np.asarray(trace.attention)}
    expected = architectures.run(model, arguments)
    if case.model.endswith("CausalLM"):
        tensors = {k: torch.from_numpy(v) for k, v in arguments.items()}
        with torch.no_grad():
            logits = model(**tensors).logits.numpy()
        results["logits"] = compute_logits(model, trace)[:, None]
        expected["logits"] = logits[:, None]
    worst = largest_difference(results, expected, arguments)
    assert max(worst.values()) < TOLERANCE, worst


# Ends and parts of names of heads, poolers, tied tables and Whisper's decoder.
UNREAD = r"pooler|classifier|^cls\.|lm_head|^predictions|mask_emb|mask_token|lm_loss|^vocab_|"
UNREAD += r"^shared\.weight|^head\.(norm|dense)|^decoder\.(weight|bias)"


@pytest.mark.parametrize("name", [*architectures.CASES, *architectures.FORMS])
def test_every_tensor_of_a_model_is_read(name, monkeypatch):
    """Biases, gates and norms of every form; what is left unread are heads and poolers."""
    model = architectures.build((architectures.CASES | architectures.FORMS)[name])
    find, names = CheckpointWeights._find_tensor, set()

    def record(self, *arguments):
        stored = find(self, *arguments)
        names.add(stored)
        return stored

    monkeypatch.setattr(CheckpointWeights, "_find_tensor", record)
    family = model.config.model_type
    for part in pretrained.FAMILIES[family].parts or (None,):
        pretrained.load(model, part=part)
    opened = pretrained.open_checkpoint(model)
    head = opened.unembedding
    assert opened.is_causal_lm == (head is not None)
    unread = r"decoder\.|^proj_out" if family == "whisper" else UNREAD
    assert [n for n in model.state_dict().keys() - names if not re.search(unread, n)] == []
    if head is not None:
        assert (head.bias is None) == (family not in ("gptj", "phi"))


def compute_logits(model, trace):
    """Computes next-token logits of our output, by the head that the checkpoint has."""
    head = pretrained.open_checkpoint(model).unembedding
    table = np.concatenate([rows for _, rows in head.table.chunks(16)])
    logits = np.asarray(trace.output) @ table.T
    logits = head.scale * (logits if head.bias is None else logits + head.bias)
    return head.softcap * np.tanh(logits / head.softcap) if head.softcap else logits


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "gpt2-head",
        "mixtral",
        "qwen2_moe",
        "dinov2",
        "modernbert",
        "whisper",
        "gptj",
    ],
)
def test_a_model_in_memory_is_its_folder(name, tmp_path):
    """The tensors of a model in memory have other names than its files."""
    model = architectures.build((architectures.CASES | architectures.FORMS)[name])
    model.save_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(model), pretrained.load(tmp_path))


def test_a_model_in_memory_that_is_damaged():
    model = architectures.build(architectures.CASES["bert"])
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    is_refused(r"BertModel: tensor .* not finite", pretrained.load, model)


def rename_parts(state, *pairs):
    """Makes a state_dict with parts of names replaced: `pairs` of (new, old)."""
    renamed = {}
    for name, value in state.items():
        for new, old in pairs:
            name = name.replace(new, old)
        renamed[name] = value
    return renamed


def test_the_first_rows_of_roberta_positions_are_of_padding():
    model = architectures.build(architectures.CASES["roberta"])
    positions = pretrained.open_checkpoint(model).outside.embedding.positions
    table = model.embeddings.position_embeddings.weight.detach()
    np.testing.assert_array_equal(positions, table[model.config.pad_token_id + 1 :])


def test_older_names_of_dinov2(tmp_path):
    """As the published files have them: BERT's names, gate and up in one map."""
    model = architectures.build(architectures.FORMS["dinov2"])
    model.config.save_pretrained(tmp_path)
    letters = zip("qkv", ("query", "key", "value"), strict=True)
    pairs = [(f"attention.{a}_proj", f"attention.attention.{b}") for a, b in letters]
    pairs += [("attention.o_proj", "attention.output.dense"), ("down_proj", "weights_out")]
    state = rename_parts(model.state_dict(), *pairs)
    for name in [n for n in state if "gate_proj" in n]:
        joint = torch.cat([state.pop(name), state.pop(name.replace("gate", "up"))])
        state[name.replace("gate_proj", "weights_in")] = joint
    torch.save(state, tmp_path / "pytorch_model.bin")
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(model), pretrained.load(tmp_path))


def test_older_entries_of_rotary_positions():
    """Files from before `rope_parameters` say the same under other names."""
    for name, gone in {
        "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000.0},
        "gemma3_text": {
            "rope_theta": 500.0,
            "rope_local_base_freq": 20.0,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "phi3": {
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {k: architectures.LONG[k] for k in ("short_factor", "long_factor")}
            | {"type": "su"},
        },
        "modernbert": {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
    }.items():
        case = architectures.FORMS[name]
        new = architectures.build(case).config.to_dict()
        old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types")} | gone
        assert pretrained.config_of(json.loads(json.dumps(old))) == pretrained.config_of(new), name


def test_a_scaling_that_users_add_beside_the_new_entry_counts():
    """As in transformers, which forgets the other entry, its base too."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    rotary = {"rope_type": "default", "rope_theta": 500.0}
    saved = transformers.LlamaConfig(**sizes, rope_parameters=rotary).to_dict()
    extended = saved | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    theirs = transformers.LlamaConfig(**extended).to_dict()
    ours = pretrained.config_of(json.loads(json.dumps(extended)))
    assert ours == pretrained.config_of(json.loads(json.dumps(theirs)))
    assert ours.rotary_scaling == (4.0,)


@pytest.mark.parametrize("name", full_but(architectures.FORMS, "gemma2", "mixtral"))
def test_layers_one_by_one_are_those_of_the_stack(name, tmp_path):
    """As `stream` reads them; from a file in bfloat16, too, vectors are changed in float32."""
    model = architectures.build(architectures.FORMS[name]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    _, params = pretrained.load(tmp_path)
    opened = pretrained.open_checkpoint(tmp_path)
    for index in range(opened.config.depth):
        row = jax.tree.map(lambda a, i=index: a[i], params.layers)
        jax.tree.map(np.testing.assert_array_equal, opened.layer(index), row)
    if architectures.FORMS[name].model.endswith("CausalLM"):
        head = np.concatenate([rows for _, rows in opened.unembedding.table.chunks(16)])
        expected = model.get_output_embeddings().weight.detach().float().numpy()
        np.testing.assert_array_equal(head.astype(np.float32), expected)
        assert opened.unembedding.softcap == getattr(model.config, "final_logit_softcapping", None)
        if name in ("gptj", "phi"):
            expected = model.lm_head.bias.detach().float().numpy()
            np.testing.assert_array_equal(np.float32(opened.unembedding.bias), expected)


def test_the_language_model_beside_an_image_tower(tmp_path):
    """Gemma 3 as published: its entries under text_config, its names behind a prefix."""
    model = architectures.build(architectures.FORMS["gemma3_text"])
    text = model.config.to_dict()
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {f"language_model.{name}": value for name, value in model.state_dict().items()}
    state["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    torch.save(state, tmp_path / "pytorch_model.bin")
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(model), pretrained.load(tmp_path))
