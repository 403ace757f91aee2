"""bench.py COUNT ROUNDS: bare, appends alone, appends shared, interleaved."""
import asyncio, os, sys, random, statistics
from pathlib import Path
sys.path.insert(0, "/work/wt/pggroups")
from benchmarks.datastores import ALL, folder_for_all
from benchmarks.measuring import Bench
count, rounds = int(sys.argv[1]), int(sys.argv[2]); seconds = float(os.environ.get("SECONDS_", "1.0"))
async def main():
    with folder_for_all(Path("/dev/shm")) as folder:
        async with ALL["postgres"](folder) as ds:
            bench = Bench(ds)
            await bench.prepare(count)
            dr = ds.driver
            groups = dr._groups
            shared = groups.append
            sides = {"bare": ("bare", 0), "off alone": ("off", 0), "off shared": ("off", 1), "on alone": ("on", 0), "on shared": ("on", 1)}
            res = {k: [] for k in sides}
            ratio = {k: [] for k in sides}
            for r in range(rounds + 1):
                got = {}
                for side in random.sample(list(sides), len(sides)):
                    kind, g = sides[side]
                    groups.append = shared if g else dr._append_alone
                    b = await bench.block(kind, count, seconds)
                    got[side] = b.rate
                    if r: res[side].append((b.rate, 1e6*b.client/b.turns, 1e6*b.server/b.turns, b.p99, b.errors))
                if r:
                    for k in sides: ratio[k].append(got[k] / got["bare"])
            for side, v in res.items():
                m = [statistics.median(c) for c in zip(*v)]
                q = sorted(ratio[side])
                print(f"{count:4} {side:11} {m[0]:7.0f} turns/s  {statistics.median(q):5.2f} ({q[0]:.2f} to {q[-1]:.2f}) of bare  client {m[1]:5.0f} us  server {m[2]:5.0f} us  p99 {m[3]:6.1f} ms  errors {m[4]:.0f}", flush=True)
asyncio.run(main())
