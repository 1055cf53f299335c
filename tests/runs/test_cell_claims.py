"""Claims: one of several has a part, what a dead one had is taken over, by one alone."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rank_collapse.runs import RunError
from rank_collapse.runs.claims import Claims


def test_a_part_has_one_holder_until_it_is_given_back(tmp_path):
    claims, others = Claims(tmp_path), Claims(tmp_path)
    assert claims.holder("a.5") is None
    with claims.take("a.5") as claim:
        assert claim is not None
        assert others.take("a.5") is None and others.holder("a.5").startswith(f"pid {os.getpid()} ")
        assert others.holder("a") is None
        with others.take("a"):
            pass
    assert others.holder("a.5") is None
    with others.take("a.5"):
        assert claims.take("a.5") is None
        assert claims.holders().keys() == {"a.5"}
    assert claims.holders() == {}


def test_of_many_at_once_one_succeeds(tmp_path):
    everyone = [Claims(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for name in "abc":
            for _ in range(5):  # again and again: the file of a new number each time
                got = [c for c in pool.map(lambda claims, n=name: claims.take(n), everyone) if c]
                assert len(got) == 1
                got[0].close()


DYING = """
import os, signal, sys
from rank_collapse.runs.claims import Claims
assert Claims(sys.argv[1]).take("part") is not None
print("taken", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_had_is_taken_over(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", DYING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"taken\n"
        claims = Claims(tmp_path)
        assert claims.take("part") is None and f"pid {process.pid} " in claims.holder("part")
        process.kill()
        process.wait()
    with claims.take("part") as claim:
        assert claim is not None and claims.take("part") is None


def test_another_host_lives_as_long_as_it_gives_signs(tmp_path):
    claims = Claims(tmp_path, patience=0.6)
    claim = claims.take("part")
    found = json.loads(claim.path.read_text())
    claim.path.write_text(json.dumps(found | {"host": "elsewhere", "pid": 1}))
    time.sleep(0.9)  # longer than its patience: the thread has touched the file meanwhile
    assert claims.take("part") is None
    claim._ended.set()
    claim._thread.join()
    time.sleep(0.7)
    assert claims.take("part") is not None


@pytest.mark.parametrize("number", [os.getppid, os.getpid])
def test_a_number_that_another_process_has_now_is_not_the_holder(number, tmp_path):
    claims = Claims(tmp_path)
    claim = claims.take("part")
    found = json.loads(claim.path.read_text())
    if not found["start"]:
        pytest.skip("this system does not tell when a process began")
    claim.path.write_text(json.dumps(found | {"pid": number(), "start": "1"}))
    assert claims.holder("part") is None
    # One that is only just being written is judged by its time alone.
    for content in ("", '{"host"', "[]", '{"host": 1}'):
        claim.path.write_text(content)
        assert claims.take("part") is None and claims.holder("part") == "pid ? on ?"


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file"):
        Claims(tmp_path / "file")
