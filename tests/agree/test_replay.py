"""One run's sublayers on the other run's inputs: tests/oracles/rounded_transformer.py."""

from dataclasses import replace

import numpy as np
import pytest

from rank_collapse.agree.alignment import align_tokens
from rank_collapse.agree.comparison import compare_recordings
from rank_collapse.agree.recording import open_recording, write_recording
from rank_collapse.agree.replay import Replay, find_replay, pair_layers
from tests.oracles.rounded_transformer import Fault, draw_model, run
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

NOISE = 2.0**-10


@pytest.fixture
def compare(tmp_path):
    """Return a function that compares a network with its rounded, faulty copy by a replay."""

    def write(name, arrays, **metadata):
        write_recording(tmp_path / f"{name}.safetensors", arrays, metadata)
        return open_recording(tmp_path / f"{name}.safetensors")

    def compare_model(
        model, dtype="bfloat16", fault=None, run_again=0, has_first=True, probed=True
    ):
        pair = [run(model), run(model, dtype, None, fault)]
        other = pair[1]
        recordings = [write("a", pair[0]), write("b", other)]
        replay = write("replay", run(model, inputs=other), inputs="b")
        noisy = [
            write(f"noisy{k}", run(model, inputs=other, noise=NOISE, seed=k), noise=str(NOISE))
            for k in range(2)
        ]
        if not has_first:
            return compare_recordings(replay, recordings[1])
        chosen = Replay(run_again, replay, (replay, *noisy) if probed else ())
        if run_again:
            recordings.reverse()
        return compare_recordings(*recordings, chosen)

    return compare_model


@pytest.mark.parametrize("probed", [True, False])
def test_rounding_is_no_fault(compare, probed):
    for seed in range(10_000, 10_006):
        model, _ = draw_model(seed)
        answer = compare(model, probed=probed)
        assert answer.agree and all(row.judged for row in answer.rows)


def test_what_is_added_is_measured_without_what_comes_in(compare):
    """A mistake in all layers is found in each, although the streams part from the first on."""
    model, _ = draw_model(3, post_norm=False)
    answer = compare(model, fault=Fault("MLP scaled", None, 0.3))
    mlps = [row for row in answer.rows if row.part == "mlp"]
    assert_close([row.scale for row in mlps], -0.3, atol=0.01)
    assert mlps[-1].error_in > 0.05 and answer.first == {"layer": 0, "part": "mlp"}


@pytest.mark.parametrize(
    ("kind", "size", "part"),
    [
        ("noise", 0.04, "attention"),
        ("bias", 0.05, "attention"),
        ("attention scaled", 0.02, "attention"),
        ("MLP scaled", 0.02, "mlp"),
        ("skip scaled", 0.02, "layer"),
    ],
)
def test_small_mistakes_are_found(compare, kind, size, part):
    for seed in (31, 33, 34):
        model, _ = draw_model(seed, post_norm=False)
        layer = model.depth // 2
        for chosen in ({"run_again": 0}, {"run_again": 1}, {"has_first": False}):
            if not chosen.get("has_first", True) and kind in ("noise", "bias"):
                continue  # without probes that is within what rounding may add
            answer = compare(model, fault=Fault(kind, layer, size), **chosen)
            assert answer.first == {"layer": layer, "part": part}
            if "scaled" in kind and part != "layer":
                sign = 1 if chosen.get("run_again") else -1
                row = next(r for r in answer.rows if (r.layer, r.part) == (layer, part))
                assert_close(row.scale, sign * size, atol=0.005)


def test_both_recordings_on_other_inputs_are_refused(tmp_path):
    arrays = run(draw_model(3)[0])
    recordings = []
    for name in "ab":
        write_recording(tmp_path / f"{name}.safetensors", arrays, {"inputs": "c"})
        recordings.append(open_recording(tmp_path / f"{name}.safetensors"))
    is_refused("both recorded on another run's inputs", compare_recordings, *recordings)


def test_one_factor_of_the_size_of_rounding_is_none(compare):
    """The sum of rounded attention weights is no 1: SmolLM2's layer 24 is 1.005 times its size."""
    model, _ = draw_model(31, post_norm=False)
    assert compare(model, fault=Fault("attention scaled", 2, -0.005)).agree
    answer = compare(model, fault=Fault("attention scaled", 2, -0.02))
    assert "multiplied by 1.02" in answer.kind


@pytest.mark.parametrize("kind", ["temperature", "theta", "rotary pairs"])
def test_a_mistake_of_queries_and_keys_is_no_factor(compare, kind):
    """A higher temperature makes the output smaller, not by one number."""
    for seed in (3, 31):
        size = {"temperature": 0.2, "theta": 0.1}.get(kind, 0)
        for causal, words in (
            (True, "queries and keys|positions differ"),
            (False, "bidirectional"),
        ):
            model, _ = draw_model(seed, post_norm=False, causal=causal)
            answer = compare(model, fault=Fault(kind, 1, size))
            assert answer.first == {"layer": 1, "part": "attention"}
            assert any(word in answer.kind for word in words.split("|"))


def test_a_window_is_told_from_positions(compare):
    for seed, words in ((3, "from position 4 on"), (31, "from position 4 on")):
        model, _ = draw_model(seed, post_norm=False, causal=True)
        assert words in compare(model, fault=Fault("window", 1, 4)).kind


def test_a_factor_of_a_skip_is_named(compare):
    model, _ = draw_model(31, post_norm=False)
    answer = compare(model, fault=Fault("skip scaled", 1, 0.5))
    assert answer.first == {"layer": 1, "part": "layer"} and "a factor of a skip" in answer.kind


@pytest.mark.parametrize("seed", [1_000_094, 2_200_040, 2_200_128, 2_300_183])
def test_rounding_of_few_tokens_is_no_fault(compare, seed):
    """MLPs of one to eight tokens, whose rounding was underestimated."""
    model, _ = draw_model(seed)
    num_tokens = {1: None, 22: 1, 23: 2}[seed // 100_000 if seed > 2_000_000 else 1]
    if num_tokens:
        model = replace(model, tokens=model.tokens[:num_tokens], spike=False)
    assert all(compare(model, dtype).agree for dtype in ("bfloat16", "float16"))


@pytest.mark.parametrize("run_again", [0, 1])
def test_layers_are_paired_with_what_noise_makes_of_each_branch(tmp_path, run_again):
    """By token: the root mean square over probes, padded on the left in one run alone."""
    rng, n, d, layers, noises = np.random.default_rng(0), 5, 4, 2, (0.5, 0.25)
    mask = np.arange(n) < np.array([[5], [3]])

    def draw(name, place, **metadata):
        branches = {f"{part}_branch": layers for part in ("attention", "mlp")}
        sizes = {"residual": layers + 1} | branches
        arrays = {key: rng.normal(size=(size, 2, n, d)) for key, size in sizes.items()}
        shifted = {key: a.copy() for key, a in arrays.items()}
        for a in shifted.values():
            a[:, 1] = np.roll(a[:, 1], 2 * place, axis=1)
        shifted["mask"] = np.stack([mask[0], np.roll(mask[1], 2 * place)]).astype("uint8")
        write_recording(tmp_path / f"{name}.safetensors", shifted, metadata)
        return arrays, open_recording(tmp_path / f"{name}.safetensors")

    pairs = [draw("a", 0), draw("b", 1)]
    place = run_again  # the recordings of the replay lie as those of the run that it computes again
    replayed, *probed = (
        draw(f"r{i}", place, **({"noise": str(noise)} if noise else {}))
        for i, noise in enumerate((0, 0, *noises))
    )
    replay = Replay(run_again, replayed[1], tuple(recording for _, recording in probed))
    recordings = [recording for _, recording in pairs]
    alignment = align_tokens(*recordings)
    paired = list(pair_layers(*recordings, alignment, replay))
    arrays = [arrays for arrays, _ in pairs]
    arrays[run_again] = replayed[0]
    still, *noisy = (a for a, _ in probed)
    for index, pair in enumerate(paired):
        taken = pairs[1 - run_again][0]["residual"][index]
        for side, layer in enumerate(pair[:2]):
            for b, token in zip(*np.nonzero(mask), strict=True):
                before = taken if side == run_again else arrays[side]["residual"][index]
                assert_close(layer.before[b, token], before[b, token])
                assert_close(layer.after[b, token], arrays[side]["residual"][index + 1][b, token])
                for name in ("attention_branch", "mlp_branch"):
                    branch = arrays[side][name][index][b, token]
                    assert_close(layer.branches[name][b, token], branch)
        assert pair.inputs is not pair[run_again] and pair.inputs is pair[1 - run_again]
        assert pair.gains.keys() == {"attention_branch", "mlp_branch"}
        for name, gains in pair.gains.items():
            for b, token in zip(*np.nonzero(mask), strict=True):
                squares = [
                    (np.linalg.norm((a[name] - still[name])[index, b, token]) / noise) ** 2
                    for a, noise in zip(noisy, noises, strict=True)
                ]
                assert_close(gains[b, token], np.sqrt(np.mean(squares)))
    plain = next(pair_layers(*recordings, alignment, None))
    assert plain.inputs is None and plain.gains == {}
    assert_close(plain.second.before[0], pairs[1][0]["residual"][0, 0])


def test_a_replay_is_found_by_its_metadata(tmp_path):
    arrays = run(draw_model(3)[0])
    for name, metadata in (("a", {}), ("b", {"inputs": "a"})):
        write_recording(tmp_path / f"{name}.safetensors", arrays, metadata)
    plain, replay = (open_recording(tmp_path / f"{name}.safetensors") for name in "ab")
    assert find_replay(plain, plain) is None
    assert find_replay(plain, replay) == Replay(1, replay)
    assert find_replay(replay, plain) == Replay(0, replay)
