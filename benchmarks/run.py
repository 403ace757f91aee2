"""What a turn and a read cost beside a bare round trip, and whether either grows with the conversation.

    python -m benchmarks.run [--datastores redis,postgres] [-o RESULTS.md] [--picture results.svg]

For each datastore: `add_turn` and `get_llm_context` beside one bare write and one bare read of the same bytes
through the same client library, after 10, 100, 1,000 and 10,000 turns with folding on, and with 32
conversations at once. The calls take turns, in random order, so that whatever slows the machine slows all.
The background settles before a call: what is measured is what a caller waits for.

`--pause 0.003` lets the machine fall asleep before each call, as it does between the turns of a person;
then caches are cold, and what has more code pays more for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from pathlib import Path

from benchmarks import measuring, report
from benchmarks.datastores import ALL, folder_for_all

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a new directory in it is used
_ROOM_BYTES = 4 * 1024**3


async def measure(arguments: argparse.Namespace) -> report.Results:
    """Measure what was asked for, one datastore after the other."""
    results = report.Results(arguments.rounds)
    for length in arguments.lengths:
        results.in_process.append(await measuring.in_process(length, arguments.rounds))
    for name in arguments.datastores:
        # In memory, where there is some to be had as files: no disk hides the difference, or makes one.
        in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
        with folder_for_all(_MEMORY if in_memory else None) as folder:
            try:
                async with ALL[name](folder) as datastore:
                    print(datastore.about, file=sys.stderr)
                    with measuring.Library.watched(datastore.library):
                        lengths = [
                            await measuring.alone(datastore, length, arguments.rounds, arguments.pause)
                            for length in arguments.lengths
                        ]
                    together = await measuring.together(
                        datastore, blocks=arguments.blocks, seconds=arguments.seconds
                    )
                    measured = report.Measured(datastore.name, datastore.about, lengths, together)
                    results.datastores.append(measured)
            except LookupError as reason:
                results.missing[name] = str(reason)
    return results


def main() -> None:
    """Measure, print, and write to files if told to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datastores", type=lambda text: text.split(","), default=list(ALL))
    parser.add_argument("--lengths", type=_numbers, default=[10, 100, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=300, help="calls of each kind at each length")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of idleness before each call")
    parser.add_argument("--blocks", type=int, default=5, help="of many conversations at once")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long such a block lasts")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--picture", type=Path, help="its name ends with .svg or .png")
    arguments = parser.parse_args()
    if unknown := set(arguments.datastores) - set(ALL):
        parser.error(f"no datastore {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    results = asyncio.run(measure(arguments))
    picture = None
    if arguments.picture:
        report.draw(results, arguments.picture)
        picture = os.path.relpath(arguments.picture, (arguments.output or Path()).parent)
    page = report.markdown(results, picture)
    print(page)
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
