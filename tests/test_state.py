import json
import os
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from adaspec import Context, Controller, Plan, PlanSpace, RoundOutcome
from adaspec.state import Replica, StateFile, merged, open_store, restore

SPACE = PlanSpace.grid("target", ["draft"], [2, 4])


def played(rounds, plan=SPACE[1], seed=0):
    controller = Controller(SPACE, seed=seed)
    for _ in range(rounds):
        decision = controller.choose(Context())
        controller.observe(decision, RoundOutcome(tokens=1 + bool(decision.plan.windows), seconds=0.01))
    return controller


def rounds_of(state):
    return sum(sums[0] for sums in state["totals"].values())


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return str(tmp_path / "states") if request.param == "local" else f"memory://{tmp_path.name}"


def test_a_state_survives_a_round_trip(folder):
    controller, store = played(12), open_store(f"{folder}/state.json")
    assert store.load() is None
    store.save(controller.state_dict())
    fresh = Controller(SPACE)
    assert restore(fresh, open_store(f"{folder}/state.json"))
    assert fresh.state_dict() == controller.state_dict()


@pytest.mark.parametrize(
    "content", [b"", b'{"format": "adas', b"\xff\xfe", b"[1, 2]", b"null", b'{"seconds": NaN}', b"[" * 100_000]
)
def test_a_corrupt_file_is_set_aside_not_deleted(tmp_path, caplog, content):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert StateFile(path).load() is None
    (aside,) = tmp_path.glob("state.json.corrupt-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text
    assert not path.exists()


def test_saving_over_a_corrupt_file_keeps_it_too(tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(b"half a st")
    StateFile(path).save({"a": 1})
    (aside,) = tmp_path.glob("state.json.corrupt-*")
    assert aside.read_bytes() == b"half a st"
    assert StateFile(path).load() == {"a": 1}


def test_a_state_that_is_broken_inside_is_set_aside_and_changes_nothing(tmp_path):
    path, controller = tmp_path / "state.json", played(8)
    state = played(20).state_dict()
    del state["costs"]["rounds"]  # read last: the rest is loaded by then
    path.write_text(json.dumps(state))
    before = controller.state_dict()
    assert not restore(controller, StateFile(path))
    assert controller.state_dict() == before
    assert len(list(tmp_path.glob("state.json.corrupt-*"))) == 1


def test_a_state_of_another_target_is_refused_and_stays(tmp_path):
    path = tmp_path / "state.json"
    StateFile(path).save(Controller(PlanSpace([Plan(("other",))])).state_dict())
    with pytest.raises(ValueError, match="'other'"):
        restore(Controller(SPACE), StateFile(path))
    assert path.exists()


def test_a_state_of_another_model_is_refused_though_plans_call_both_target(tmp_path):
    store = open_store(tmp_path / "state.json")
    store.save(Controller(SPACE, identity="small (fp16 on cpu)").state_dict())
    with pytest.raises(ValueError, match=r"state\.json: .*'small \(fp16 on cpu\)', not of 'large"):
        restore(Controller(SPACE, identity="large (fp16 on cpu)"), store)
    assert restore(Controller(SPACE, identity="small (fp16 on cpu)"), store)


@pytest.mark.parametrize("foreign", [{"a": 1}, Controller(SPACE, identity="another").state_dict()])
def test_a_file_that_does_not_belong_into_a_shared_folder_is_named(tmp_path, foreign):
    Replica(tmp_path, "one").save(played(3).state_dict())
    (tmp_path / "zz.json").write_text(json.dumps(foreign))
    with pytest.raises(ValueError, match=r"zz\.json: "):
        merged(tmp_path)


@pytest.mark.parametrize("name", ["aa", "zz"])
def test_a_damaged_replica_is_named_with_the_place_of_its_damage(tmp_path, name):
    Replica(tmp_path, "one").save(played(3).state_dict())
    Replica(tmp_path, name).save(played(3).state_dict() | {"totals": {"t": [1]}})
    with pytest.raises(ValueError, match=rf"{name}\.json: totals\.t is a list of 3"):
        merged(tmp_path)


def test_replicas_write_their_own_and_a_new_one_inherits_all(folder):
    for name, rounds in (("a", 10), ("b", 15)):
        Replica(folder, name).save(played(rounds).state_dict())
    assert rounds_of(Replica(folder, "a").load()) == 10
    assert rounds_of(Replica(folder, "new").load()) == 25
    assert rounds_of(merged(folder)) == 25
    assert open_store(folder, "a").load() == Replica(folder, "a").load()


def test_a_corrupt_replica_does_not_spoil_the_others(tmp_path):
    Replica(tmp_path, "a").save(played(10).state_dict())
    (tmp_path / "b.json").write_bytes(b"{")
    assert rounds_of(Replica(tmp_path, "b").load()) == 10
    assert list(tmp_path.glob("b.json.corrupt-*"))


@pytest.mark.parametrize("name", ["", "a/b", "..", "c:d"])
def test_a_replica_needs_a_plain_name(name):
    with pytest.raises(ValueError, match="plain file name"):
        Replica("states", name)


# The second save stops where the argument says, in the middle of a write, and waits to be killed.
CHILD = """
import os, sys, time
from adaspec.state import StateFile

def stop(*_):
    print("in the middle", flush=True)
    time.sleep(60)

path, where = sys.argv[1:]
store = StateFile(path)
store.save({"n": 1, "ballast": "x" * 200_000})
if where == "write":
    dumps = __import__("json").dumps
    class Torn(str):
        def encode(self):
            return b'{"n": 2, "ballast": "xxx'
    import adaspec.state
    adaspec.state.json.dumps = lambda *a, **k: Torn()
os.fsync = stop
store.save({"n": 2, "ballast": "x" * 200_000})
"""


@pytest.mark.parametrize("where", ["sync", "write"])
def test_kill_9_in_the_middle_of_a_write_leaves_the_last_complete_state(tmp_path, where):
    path = tmp_path / "state.json"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path), where], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "in the middle\n"
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert (tmp_path / ".state.json.new").exists()  # it was in the middle
    again = StateFile(path)
    assert again.load()["n"] == 1
    again.save({"n": 3})  # the lock of the killed writer is gone, and so is its torn file
    assert StateFile(path).load() == {"n": 3}
    assert {file.name for file in tmp_path.iterdir()} == {"state.json", "state.json.lock"}


HAMMER = """
import sys
from adaspec.state import StateFile
store = StateFile(sys.argv[1])
for n in range(1, 1_000_000):
    store.save({"n": n, "ballast": "x" * 500_000})
    print(n, flush=True)
"""


def test_kill_9_at_any_moment_loses_no_acknowledged_state(tmp_path):
    path = tmp_path / "state.json"
    for turn in range(3):
        with subprocess.Popen([sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, text=True) as child:
            acknowledged = [int(child.stdout.readline()) for _ in range(3)]
            time.sleep(0.0007 * turn)
            os.kill(child.pid, signal.SIGKILL)
            acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
        assert StateFile(path).load()["n"] in (acknowledged[-1], acknowledged[-1] + 1)
    assert not list(tmp_path.glob("*corrupt*"))


def test_writers_take_turns(tmp_path):
    path = tmp_path / "state.json"
    code = "import sys; from adaspec.state import StateFile; s = StateFile(sys.argv[1])\n"
    code += "for n in range(40): s.save({'who': sys.argv[2], 'ballast': 'x' * 50_000})"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), str(who)]) for who in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert StateFile(path).load()["who"] in "012"


def test_a_file_has_one_owner(tmp_path):
    first, second = (StateFile(tmp_path / "new" / "state.json") for _ in range(2))
    first.claim()
    with pytest.raises(ValueError, match=r"state\.json is the state of another process"):
        second.claim()
    first.save({"n": 1})
    assert second.load() == {"n": 1}  # whoever only reads may
    first.release()
    second.claim()
    second.release()


def test_a_place_that_cannot_hold_a_lock_is_an_error_and_not_a_wait(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"state\.json cannot be made: file is a file"):
        StateFile(tmp_path / "file" / "state.json")
    (tmp_path / "other.json.owner.lock").mkdir()
    with pytest.raises(OSError, match=r"other\.json\.owner\.lock"):
        StateFile(tmp_path / "other.json").claim()
    monkeypatch.setattr("adaspec.state._LOCK_SECONDS", 0.05)
    with FileLock(tmp_path / "state.json.lock"), pytest.raises(OSError, match=r"state\.json\.lock"):
        StateFile(tmp_path / "state.json").save({"n": 1})


def test_a_url_whose_package_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ValueError, match=r"s3://bucket/state\.json cannot be reached: Install s3fs"):
        StateFile("s3://bucket/state.json")
