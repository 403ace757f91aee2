"""What other libraries cost for one turn of a conversation, and what they lose, beside stm-backends.

    python -m benchmarks.peers [--messages | --shown | --frameworks] [--peers NAME,...] [--quick] [--write]

A full run takes at most a quarter of an hour. `--messages` compares messages with tool calls instead of
turns, and `--shown` what products show, each as long. `--frameworks` compares each integration with what its
framework has of its own, in some eight minutes and an environment of `frameworks/requirements.txt`.

Each library is measured in a process of its own with a time limit, so that one that fails or hangs loses
only its own figures. `--write` writes benchmarks/PEERS.md with its chart, and the table in README.md; with
`--messages`, `--shown` or `--frameworks`, only their section of PEERS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.datastores import folder_for_all
from benchmarks.peers import report, speaking_report
from benchmarks.peers.catalogue import MESSAGES, PEERS, SHOWING, Peer
from benchmarks.peers.figures import Measured, explained
from benchmarks.peers.frameworks import report as frameworks_report
from benchmarks.peers.frameworks.catalogue import FRAMEWORKS
from benchmarks.peers.places import Place
from benchmarks.peers.servers import CREDENTIALS, serve

_ROOT = Path(__file__).parents[2]
_DIALOGUES = str(_ROOT / "examples" / "conversations.jsonl")
_MEMORY = Path("/dev/shm")  # noqa: S108 -- a new directory in it is used


@dataclass(frozen=True)
class Order:
    """What is measured, and how. All are arguments of a worker, as JSON.

    `what` is one of `COMPARED`. `each_s` are the seconds that one library may take, and `until` the time at
    which the last one may begin. Messages that are not `timed` are counted only.
    """

    each_s: float
    until: float
    quick: bool
    dialogues: str
    what: str = "turns"
    timed: bool = True


COMPARED: Mapping[str, Mapping[str, Peer]] = {
    "turns": PEERS,
    "shown": SHOWING,
    "messages": MESSAGES,
    "frameworks": FRAMEWORKS,
}
"""What is compared, and of which libraries."""


def run(names: Sequence[str], order: Order) -> Iterator[Measured]:
    """Measure libraries, datastore by datastore."""
    peers = COMPARED[order.what]
    for datastore in dict.fromkeys(peers[name].datastore for name in names):
        waiting = [Measured(name) for name in names if peers[name].datastore == datastore]
        with folder_for_all(_MEMORY if os.access(_MEMORY, os.W_OK) else None) as folder:
            try:
                with serve(datastore, folder) as server:
                    while waiting:
                        measured = waiting[0]
                        measured.about = server.about
                        if time.monotonic() > order.until:
                            measured.problems.append("the time for the whole run was over")
                        else:
                            with server.place(measured.name.replace("-", "_")) as place:
                                run_one(peers[measured.name], measured, place, order)
                        yield waiting.pop(0)
            except Exception as error:  # noqa: BLE001 -- it loses no other datastore
                print(f"{datastore}: {explained(error)}", file=sys.stderr)
                for measured in waiting:
                    measured.problems.append(explained(error))
                    yield measured


def run_one(peer: Peer, measured: Measured, place: Place, order: Order) -> None:
    """Run the process that measures one library, and take in what it says."""
    start = time.monotonic()
    argument = {"peer": asdict(peer), "place": asdict(place), **asdict(order)}
    process = subprocess.Popen(  # noqa: S603 -- it is this program
        [sys.executable, "-m", "benchmarks.peers.worker", json.dumps(argument)],
        cwd=_ROOT,
        env={**os.environ, **CREDENTIALS, "PYTHONWARNINGS": "ignore", "LANGSMITH_TRACING": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101 -- it is a pipe
    assert process.stderr is not None  # noqa: S101
    was_stopped = threading.Event()

    def stop() -> None:
        # Its own processes, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(order.each_s, lambda: (was_stopped.set(), stop()))
    complaints: list[str] = []
    reader = threading.Thread(target=lambda: complaints.extend(process.stderr or ()))
    timer.start()
    reader.start()
    try:
        for line in process.stdout:
            # A library may print, too.
            with contextlib.suppress(ValueError, AttributeError):
                measured.take(json.loads(line))
        code = process.wait()
    finally:
        timer.cancel()
        stop()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    if was_stopped.is_set():
        measured.problems.append(f"stopped after {order.each_s:.0f} s")
    elif code:
        measured.problems.append(f"the process ended with {code}: {(complaints or ['?'])[-1].strip()[:160]}")
    outcome = "; ".join(measured.problems) or "measured"
    print(f"{measured.name}: {outcome} ({time.monotonic() - start:.0f} s)", file=sys.stderr)


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def main() -> None:
    """Measure, and print the page or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=_names, help="only these; an empty list measures none")
    what = parser.add_mutually_exclusive_group()
    for name, about in (
        ("messages", "messages with tool calls, not turns"),
        ("shown", "pages, newest items and sidebars, not turns"),
        ("frameworks", "each integration beside what its framework has of its own"),
    ):
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=about)
    parser.set_defaults(what="turns")
    parser.add_argument(
        "--counts", action="store_true", help="of messages only what a busy machine does not change: no times"
    )
    parser.add_argument("--quick", action="store_true", help="a few turns each, to see that it works")
    parser.add_argument("--dialogues", default=_DIALOGUES, help="a file of conversations")
    parser.add_argument("--each", type=float, default=75, help="seconds that one library may take")
    parser.add_argument("--minutes", type=float, default=13.5, help="no library begins after that")
    parser.add_argument("--write", action="store_true", help="write benchmarks/PEERS.md and README.md")
    parser.add_argument("--figures", type=Path, help="keep figures in this file, also those of earlier runs")
    arguments = parser.parse_args()
    if arguments.counts and arguments.what != "messages":
        parser.error("--counts is for --messages")
    peers = COMPARED[arguments.what]
    names = list(peers) if arguments.peers is None else arguments.peers
    if unknown := set(names) - set(peers):
        parser.error(f"no library {', '.join(sorted(unknown))}; there are {', '.join(peers)}")
    results: dict[str, Measured] = {}
    if arguments.figures and arguments.figures.exists():
        kept = json.loads(arguments.figures.read_text("utf-8"))
        results = {each["name"]: Measured.of(each) for each in kept}
    # So that servers are stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    until = time.monotonic() + 60 * arguments.minutes
    order = Order(
        *(arguments.each, until, arguments.quick, arguments.dialogues, arguments.what),
        timed=not arguments.counts,
    )
    for measured in run(names, order):
        results[measured.name] = measured
        if arguments.figures:
            figures = json.dumps([each.as_json() for each in results.values()], indent=1)
            arguments.figures.write_text(figures, encoding="utf-8")
    every = [results[name] for name in peers if name in results]
    write, shown = _PAGES[arguments.what]
    if arguments.write:
        write(every, _ROOT)
    else:
        print(shown(every))


_PAGES: Mapping[
    str, tuple[Callable[[Sequence[Measured], Path], None], Callable[[Sequence[Measured]], str]]
] = {
    "turns": (report.write, lambda results: report.page(results, {})),
    "shown": (report.write_shown, report.shown),
    "messages": (speaking_report.write, speaking_report.section),
    "frameworks": (frameworks_report.write, frameworks_report.section),
}
"""What writes figures into the pages, and what returns them as text."""


if __name__ == "__main__":
    main()
