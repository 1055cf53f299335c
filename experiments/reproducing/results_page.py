"""Every page with results, from the folders of one run of `reproduce`.

docs/results.md with figures and tables, docs/statements.md, and the paragraph and table of results
on docs/experiments/NAME.md.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from experiments.lab import JsonObject, list_experiments, provenance, table_bytes
from experiments.reproducing import statements_page
from experiments.reproducing.filling import (
    Texts,
    fill,
    find_missing,
    read_numbers,
    read_settings,
    read_texts,
    write_numbers,
)
from experiments.reproducing.markdown import render_markdown
from experiments.reproducing.sections import (
    CAME_OUT,
    RunRecord,
    list_runs,
    make_section,
    read_flag_values,
    read_times,
)
from rank_collapse import runs
from rank_collapse.runs import files

INTRO = (
    "This page shows the results of all experiments. The list of terms comes first. Each later "
    "section shows one experiment: a figure, the claim of the paper, our result, and a CSV file "
    "with all numbers. The page on [statements](statements.md) says which claims of the papers "
    "hold. `python -m experiments.reproduce --preset={preset} --markdown` runs all experiments and "
    "writes this page. A separate [CSV file](results/runs.csv) lists for each run its command, its "
    "commit and the seconds that it took."
)
TERMS = """\
“The paper” is Dong, Cordonnier and Loukas 2021, *Attention is not all you need*, unless a section
names another paper. [Concepts](concepts.md) explains these terms at greater length.

- **Skip**: a connection that adds the input of a sublayer to the sublayer's output. Each layer has
  two sublayers, attention and an MLP. A **branch** is a sublayer without its skip.
- **Gain**: a number that multiplies a skip or the output of a branch.
- **Full model**: a network with all its skips, MLPs and norms. **Attention alone** (SAN in the
  paper) is the same network without its skips and MLPs.
- **Post-LN**: a network with a LayerNorm after each sum of skip and branch. **Pre-LN** has a
  LayerNorm before each branch. **Admin** is Post-LN with a gain ω on each skip (Liu et al. 2020).
- **Residual**, written res(X): the matrix X has one row for each token of a layer, and res(X) is X
  with the mean row subtracted from each row. The **residual ratio** is the norm of res(X) divided
  by the norm of X. It is 0 when all tokens are equal.
- **Rank collapse**: the residual ratio falls to 0 with depth.
- **Rate**, or local rate: the logarithm of the norm of the residual changes in each layer. The rate
  of a layer is this change, divided by the change in the layer before. At a rate of 3 the change
  triples from layer to layer; such a collapse is **doubly exponential**. At a rate of 1 each layer
  multiplies the norm of the residual by the same factor; such a collapse is **exponential**.
- **Token cosine**: the cosine of two tokens of a layer, as a mean over all pairs of tokens. It is 1
  when all tokens have the same direction.
- **Path**: a way through the network that takes one head, or the skip, in each layer. Its
  **length** is the number of heads on it. Each path contributes to the output of the network, and
  the output is the sum of these contributions.
- **Frozen**: a sum over paths is frozen if it uses the attention weights, norms and gates that the
  full model has for the same input. A gate is the factor f(h)/h by which an activation function f
  multiplies its input h.
- **Truncated at k**: a network from which all paths longer than k are removed. Its attention
  weights are **recomputed**, that is computed from the states that the other paths give.
- **Causal**: in a causal network each token attends only to itself and to earlier tokens.
- **At initialisation**: with random weights, before any training.
- **Weight scale**: initial weights have the standard deviation 1/√fan-in, multiplied by the weight
  scale. The fan-in of a matrix is its number of inputs. “BERT's scale” is 0.55: at BERT's width,
  768, the standard deviation is then 0.02, as in BERT.
- **Trained networks**: `albert-reactions` and `bert-reactions` read chemical reactions, and
  `bert-antibodies` reads antibodies. `minilm-l6` is a sentence encoder, `smollm2-135m` is a
  causal language model, and `whisper-tiny-en` is the encoder of a speech recogniser.
- **RTE**: a data set of English texts ([where to get it](experiments/index.md#the-texts-of-rte)).
- **Draw**: one random initialisation (a **seed**), or one text if the network is trained.
- **Statement**: a claim about a number that we measure in one or more **settings**, such as
  networks or weight scales. In a table of statements, each row is one setting with an interval for
  this setting alone. The answers on the page on statements hold for all settings of a statement
  together. The CSV file of that page has wider intervals, of the level at which the setting was
  compared with the range.
- **Brackets** after a number hold its 95 % interval. Many runs stop as soon as their statements are
  decided. The intervals of medians and shares in the tables of statements allow for this. The other
  intervals (Student's of a mean, Wilson's of a count) do not: if a run stops early, they hold the
  true value in about 90 to 96 % of runs.
- **Published**: a number, network or program of the paper's authors."""
RUNS = "results/runs.csv"  # relative to the page
TABLE = re.compile(r"(?<=<!-- filled -->\n).*?(?=<!-- end -->)", re.DOTALL)


def write_markdown(parent: Path, preset: str, docs: Path) -> Path:
    """Writes all pages with results from the complete runs of a preset.

    For each experiment the numbers of its runs fill the places of its texts (results.toml). With
    the preset "reported" each number that a text names must exist, and the experiments' own pages
    are written, too. Pictures of earlier runs are removed.

    Args:
        parent: Folder that holds the run folders.
        preset: Preset of the sizes of the runs.
        docs: Folder for results.md, results/ and statements.md; it has experiments/.

    Returns:
        The path of results.md.

    Raises:
        ValueError: A text names a number that its experiment's table does not have.
        RunError: A damaged folder.
    """
    texts = read_texts()
    names = [name for name in list_experiments() if is_complete(name, preset, parent)]
    table, sections, pages, missing_numbers = [], [], {}, []
    for name in names:
        records = []
        for run in list_runs(name, preset):
            row = {"run": run, **describe_run(parent, run)}
            table.append(row)
            label = run.partition("/")[2]
            records.append(RunRecord(parent / run, row["command"], format_run(row, preset), label))
        section = make_section(name, records)
        numbers = read_numbers(write_numbers(section.comparisons, section.claims))
        numbers = {**numbers, **read_settings(read_flag_values(name, preset))}
        wanted = find_missing(texts[name].result + texts[name].table, numbers)
        missing_numbers += [f"{name}: {placeholder}" for placeholder in wanted]
        filled = Texts(*(fill(text, numbers).strip() for text in texts[name][:2]))
        pages[f"experiments/{name}.md"] = filled
        came_out = "\n\n".join(filter(None, filled[:2])).replace("](../", "](")
        sections.append(replace(section, came_out=came_out))
    if missing_numbers and preset == "reported":
        raise ValueError(f"results.toml names rows that no table has: {'; '.join(missing_numbers)}")
    statements_page.write_page(docs, [parent / row["run"] for row in table])
    missing = [name for name in list_experiments() if name not in names]
    intro = INTRO.format(preset=preset) + (f" Not run: {', '.join(missing)}." if missing else "")
    text, contents = render_markdown("Results", intro, TERMS, sections)
    contents |= {"results.md": text.encode(), RUNS: table_bytes(table)}
    if preset == "reported":
        contents |= fill_pages(docs, pages)
    for path, content in contents.items():
        runs.make_folder((docs / path).parent)
        runs.write_atomically(docs / path, content)
    for name in names:
        for path in (docs / "results").glob(f"{name}_*.png"):
            if f"results/{path.name}" not in contents:  # of an earlier run
                path.unlink()
    return docs / "results.md"


def fill_pages(docs: Path, pages: Mapping[str, Texts]) -> dict[str, bytes]:
    """Writes results into the existing pages of experiments.

    Args:
        docs: The folder of the pages.
        pages: {path: filled texts}.

    Returns:
        {path: the page}.
    """
    contents = {}
    for path, filled in pages.items():
        if (docs / path).exists():
            page = (docs / path).read_text("utf-8")
            contents[path] = fill_page(page, filled).encode()
    return contents


def fill_page(page: str, filled: Texts) -> str:
    """Replaces the paragraph and the table of results of one page.

    Args:
        page: Page with "**Result.** …", and with "<!-- filled -->" where it has a table.
        filled: New paragraph and table.
    """
    page = CAME_OUT.sub(lambda _: f"**Result.** {filled.result}", page, count=1)
    return TABLE.sub(lambda _: f"{filled.table}\n", page, count=1)


def is_complete(name: str, preset: str, parent: Path) -> bool:
    """Returns whether all runs of an experiment have a summary.

    Args:
        name: Name of the experiment.
        preset: Preset of the sizes.
        parent: Folder that holds its run folders.
    """
    return all((parent / run / "summary.json").exists() for run in list_runs(name, preset))


def describe_run(parent: Path, name: str) -> JsonObject:
    """Reads date, seed, time, machine, version, commit and command of a run.

    Args:
        parent: Folder that holds the run folders.
        name: The run, see `list_runs`.

    Raises:
        RunError: A damaged config.json.
    """
    path, times = parent / name / "config.json", read_times(parent).get(name, {})
    saved = files.read_object(path)
    try:
        environment = saved["environment"]
        device = environment["device"]
        if environment["backend"] == "cpu":
            device = environment.get("processor", "CPU")
        return {
            "date": environment["started"][:10],
            "seed": saved["config"].get("seed"),
            "seconds": times.get("seconds"),
            "cpu_seconds": times.get("cpu_seconds"),
            "at_least": bool(times.get("at_least", True)),
            "jobs": times.get("jobs"),
            "machine": f"{environment['num_devices']} × {device}",
            "jax": provenance.list_versions(saved, "jax"),
            "commit": provenance.list_commits(saved),
            "command": saved["execution"]["command"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise files.damaged_file_error(path, f"no entry {error}") from error


def format_run(run: JsonObject, preset: str) -> str:
    """Writes what `describe_run` reads as the small print of a section."""
    seed = "" if run["seed"] is None else f", first seed {run['seed']}"
    seconds = ""
    if run["seconds"] is not None:
        bound = "at least " if run["at_least"] else ""
        another = " while another experiment ran" if run["jobs"] > 1 else ""
        seconds = f" It took {bound}{run['seconds']:.0f} s with compilation{another}."
    return (
        f"Run of {run['date']}{seed}, on {run['machine']}.{seconds} Sizes: preset “{preset}”. "
        f"JAX {run['jax']}. Commit: {run['commit'] or 'unknown'}."
    )
