"""Tables of a device: the largest difference from a CPU, and the pages."""

import numpy as np
import pytest

from experiments.benchmarks import device_pages
from tests.oracles.device_lines import make_line
from tests.support.folders import REPOSITORY


def write_run(folder, rows="a,b\n1,x\n,y\n", **arrays):
    folder.mkdir(parents=True)
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "results.csv").write_text(rows)
    return folder


def test_the_largest_difference_is_named(tmp_path):
    same = np.array([1.0, np.nan, np.inf])
    cpu = write_run(tmp_path / "cpu", same=same, other=np.array([1.0, 4.0]), count=np.arange(3))
    device = write_run(
        tmp_path / "device", same=same, other=np.array([1.5, 4.0]), count=np.arange(3)
    )
    assert device_pages.compare_runs("x", device, cpu) == ("x", 4, 3, "other", 0.125)
    nan = write_run(tmp_path / "nan", same=same, other=np.array([np.nan, 4.0]), count=np.arange(3))
    assert device_pages.compare_runs("x", nan, cpu).largest == np.inf
    table = write_run(
        tmp_path / "table",
        "a,b\n3,x\n,y\n",
        same=same,
        other=np.array([1.0, 4.0]),
        count=np.arange(3),
    )
    assert device_pages.compare_runs("x", table, cpu)[3:] == ("results.csv: a", 2.0)
    fewer = write_run(tmp_path / "fewer", same=same)
    with pytest.raises(ValueError, match="has count"):
        device_pages.compare_runs("x", fewer, cpu)


def test_the_page_of_the_device_gets_the_tables(tmp_path):
    for name, kind in (("accelerators", "accelerator"), ("benchmarks", "cpu")):
        text = f"before\n<!-- measured: {kind} -->\nold\n<!-- end -->\nafter\n<!-- end -->\n"
        (tmp_path / f"{name}.md").write_text(text)
    step = {"step": "tests", "code": 0, "last_line": "9 passed in 3 s", "driver": "H200, 580.1"}
    lines = [make_line("products"), make_line("seeds", gigabytes=1.5), step]
    differences = [device_pages.Difference("run_sort", 12, 3, "loss", 1.2e-5)]
    (page,) = device_pages.write_pages(tmp_path, lines, differences)
    assert page.name == "accelerators.md"
    assert page.read_text() == (
        "before\n<!-- measured: accelerator -->\n"
        "Measured on 2030-01-02: gpu NVIDIA H200 x 1 (H200, 580.1), 16 cores, JAX 0.11.0.\n\n"
        + "\n\n".join(
            f"| {name} | ms, fastest round | compiling, s |{head}\n|---|---|---|{line}\n"
            f"| vmapped | 2 | 1.25 |{value}\n\n"
            f"| {name} | |\n|---|---|\n| TFLOP/s | 51.2 |\n| products | 5,981 |\n"
            "| seeds from which | none |"
            for name, head, line, value in (
                ("products", "", "", ""),
                ("seeds", " GB |", "---|", " 1.5 |"),
            )
        )
        + "\n\nTests on the device: 9 passed in 3 s.\n\n"
        "| experiment | arrays, columns | equal to the bit | largest difference from a CPU |\n"
        "|---|---|---|---|\n| run_sort | 12 | 3 | 1.2e-05, loss |\n"
        "<!-- end -->\nafter\n<!-- end -->\n"
    )
    (page,) = device_pages.write_pages(tmp_path, [make_line("products", "cpu cpu x 2")], [])
    assert page.name == "benchmarks.md" and "old" not in page.read_text()


def test_flags_and_empty_tables_are_compared_too(tmp_path):
    """The first of equal differences has a name, 0 has none; NaN is equal to NaN alone."""
    truth = np.array([True, False])
    cpu = write_run(tmp_path / "cpu", "", flag=truth, b=np.ones(2), c=np.array([np.nan, 2.0]))
    for number, (changes, expected) in enumerate(
        (
            ({}, (3, 3, "", 0.0)),
            ({"flag": ~truth}, (3, 2, "flag", 1.0)),
            ({"flag": ~truth, "b": np.array([1.0, 2.0])}, (3, 1, "flag", 1.0)),
            ({"b": np.array([1.0, 1 + 1e-9])}, (3, 2, "b", 1e-9)),
            ({"c": np.array([1.0, 2.0])}, (3, 2, "c", np.inf)),
            ({"c": np.array([np.nan, np.nan])}, (3, 2, "c", np.inf)),
        )
    ):
        arrays = {"flag": truth, "b": np.ones(2), "c": np.array([np.nan, 2.0])} | changes
        device = write_run(tmp_path / f"{number}", "", **arrays)
        comparison = device_pages.compare_runs("x", device, cpu)
        assert comparison[1:4] == expected[:3] and comparison.largest == pytest.approx(expected[3])


def test_of_repeated_measurements_the_last_one_counts(tmp_path):
    """Of a benchmark, of the tests, and of the machine, whose date it has."""
    page = tmp_path / "accelerators.md"
    page.write_text("<!-- measured: accelerator -->\n<!-- end -->\n")
    first, other, last = make_line("seeds"), make_line("sort"), make_line("seeds")
    last["timings"] = [last["timings"][0] | {"seconds": [0.007]}]
    last["machine"] = last["machine"] | {"date": "2030-03-04"}
    last["figures"] = {"ratio of CPU ms": 7.5, "CPU ms, vmapped": 3.0}
    steps = [{"step": "tests", "last_line": f"{n} passed"} for n in (8, 9)]
    device_pages.write_pages(tmp_path, [first, other, last, *steps], [])
    text = page.read_text()
    assert "Measured on 2030-03-04: " in text and "Tests on the device: 9 passed." in text
    assert text.count("| seeds | ms, fastest round |") == 1 and "| vmapped | 7 | 1.25 |" in text
    assert "| ratio of CPU ms | 7.5 |" in text and "CPU ms, vmapped" not in text
    assert text.index("| seeds |") < text.index("| sort |")


def test_counts_without_a_sign_are_compared(tmp_path):
    folders = [tmp_path / name for name in ("cpu", "device")]
    for folder, count in zip(folders, (4, 5), strict=True):
        write_run(folder, "", bytes=np.array([count, 2], np.uint8))
    assert device_pages.compare_runs("x", *folders[::-1]) == ("x", 1, 0, "bytes", 0.25)


def test_a_column_stands_where_one_case_has_a_number(tmp_path):
    (tmp_path / "accelerators.md").write_text("<!-- measured: accelerator -->\n<!-- end -->\n")
    line = make_line("seeds")
    line["timings"] = [line["timings"][0], line["timings"][0] | {"case": "map", "gigabytes": 0.25}]
    device_pages.write_pages(tmp_path, [line], [])
    text = (tmp_path / "accelerators.md").read_text()
    assert "| seeds | ms, fastest round | compiling, s | GB |" in text
    assert "| vmapped | 2 | 1.25 |  |\n| map | 2 | 1.25 | 0.25 |" in text


@pytest.mark.parametrize("lines", [[], [{"step": "tests", "code": 0, "last_line": "9 passed"}]])
def test_steps_without_measurements_are_refused(lines, tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        device_pages.write_pages(tmp_path, lines, [])


def test_the_pages_have_a_place_for_the_numbers():
    for name, kind in (("accelerators", "accelerator"), ("benchmarks", "cpu")):
        text = (REPOSITORY / f"docs/{name}.md").read_text("utf-8")
        assert text.count(f"<!-- measured: {kind} -->\n") == 1


def test_runs_without_a_table_or_with_words_in_it_are_compared_by_their_numbers(tmp_path):
    """A run need not have both files; arrays of other shapes are refused."""
    cpu, device = tmp_path / "cpu", tmp_path / "device"
    for folder, scale in ((cpu, 1.0), (device, 1.5)):
        folder.mkdir()
        np.savez(folder / "arrays.npz", x=scale * np.arange(3), zero=np.zeros(2))
    assert device_pages.compare_runs("x", device, cpu) == ("x", 2, 1, "x", 0.5)
    np.savez(device / "arrays.npz", x=np.arange(3.0), zero=np.array([0.0, 1e-9]))
    assert device_pages.compare_runs("x", device, cpu) == ("x", 2, 1, "zero", np.inf)
    np.savez(device / "arrays.npz", x=np.arange(4.0), zero=np.zeros(2))
    with pytest.raises(
        ValueError, match=r"^x: x has shape \(4,\) in .*device and \(3,\) in .*cpu$"
    ):
        device_pages.compare_runs("x", device, cpu)
    for folder, value in ((cpu, -4), (device, -5)):
        (folder / "arrays.npz").unlink()
        (folder / "results.csv").write_text(f"a,word,b\n1,u,{value}\n2,v,2\n")
    expected = ("x", 2, 1, "results.csv: b", 0.25)
    assert device_pages.compare_runs("x", device, cpu) == expected


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *(
            (None, ""),
            (0.0, "0"),
            (0.012345, "0.0123"),
            (99.96, "100"),
            (100.4, "100"),
            (5981.2, "5,981"),
        ),
        *((-5981.2, "-5,981"), (-2.5, "-2.5"), (999999.0, "999,999"), (1e6, "1e+06")),
    ],
)
def test_a_number_has_three_digits_and_no_exponent_below_a_million(value, written):
    assert device_pages.write_number(value) == written


def test_the_driver_is_that_of_the_first_step_that_names_one_and_figures_may_be_none(tmp_path):
    (tmp_path / "benchmarks.md").write_text("<!-- measured: cpu -->\n<!-- end -->\n")
    steps = [{"step": "a"}, {"step": "b", "driver": ""}]
    steps += [{"step": name, "driver": f"driver {name}"} for name in "cd"]
    for listed, name in ((steps, "cpu cpu x 2 (driver c)"), (steps[:2], "cpu cpu x 2")):
        line = make_line("products", "cpu cpu x 2", figures={"CPU ms, vmapped": 3.0})
        device_pages.write_pages(tmp_path, [line, *listed], [])
        text = (tmp_path / "benchmarks.md").read_text()
        assert f"Measured on 2030-01-02: {name}, 16 cores" in text
        assert "| products | |" not in text and text.count("\n|---") == 1
