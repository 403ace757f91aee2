"""pg_check.py: group append under contention: 3 processes, each with today's append or group append, on the same 40 records, with cancelled callers,
a full record, an expired record, a deleted record, folds of another connection. Checks: what was acknowledged is there once, lengths are what the contract
says, order of one caller's appends, sizes of the record's row."""
import asyncio, os, random, sys, json, tempfile, uuid
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "/work/wt/pggroups")
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends.drivers.contract import Key, new_version, ANY, KEEP
from stm_backends.errors import TooLarge, OutcomeUnknown, StorageError

async def worker(url, schema, who, seconds):
    settings = replace(PostgresSettings.from_url(url), schema=schema, pool_size=16, max_record_bytes=60_000, max_entry_bytes=60_000)
    dr = PostgresDriver(settings); await dr.open()
    stats = [0, 0, 0]
    inner_t, inner_a = dr._groups._together, dr._groups._alone
    async def t(take):
        def noted():
            a = take(); stats[0] += 1; stats[1] += len(a); return a
        return await inner_t(noted)
    async def al(one):
        stats[2] += 1; return await inner_a(one)
    dr._groups._together, dr._groups._alone = t, al
    keys = [Key("acme:u:memory", f"s{n}") for n in range(40)]
    acked, unknown, n = [], [], 0
    loop = asyncio.get_running_loop(); until = loop.time() + seconds
    rnd = random.Random(who)
    async def caller(c):
        n = 0; 
        while loop.time() < until:
            key = rnd.choice(keys); n += 1
            e = f"{who} {c} {n} ".encode() + b"x" * rnd.randrange(200)
            try:
                if rnd.random() < .05:
                    t = asyncio.ensure_future(dr.append(key, e, initial_version=new_version(), ttl=None if rnd.random()<.5 else 3600.0))
                    await asyncio.sleep(rnd.random()*.002); t.cancel()
                    try: length = await t; acked.append((key.name, e.decode().split(" x")[0].strip(), length))
                    except asyncio.CancelledError: unknown.append((key.name, " ".join(e.decode().split(" ")[:3])))
                    continue
                length = await dr.append(key, e, initial_version=new_version(), ttl=None if rnd.random()<.5 else 3600.0)
                acked.append((key.name, " ".join(e.decode().split(" ")[:3]), length))
            except TooLarge: pass
            except OutcomeUnknown: unknown.append((key.name, " ".join(e.decode().split(" ")[:3])))
    await asyncio.gather(*(caller(c) for c in range(24)))
    await dr.close()
    print(json.dumps(dict(acked=[(a, " ".join(b.split(" ")[:3]), l) for a, b, l in acked], unknown=unknown, stats=stats)))

async def main():
    from tests.support.postgresql import Postgres, find_binaries
    from benchmarks.datastores import folder_for_all
    with folder_for_all(Path("/dev/shm")) as folder, folder_for_all() as programs:
        server = Postgres(find_binaries(programs), folder / "data"); server.start()
        try:
            url, schema = server.url, "chk"
            async def one():
                s = replace(PostgresSettings.from_url(url), schema=schema)
                dr = PostgresDriver(s, create=True); await dr.open(); return dr
            dr = await one()
            ps = [await asyncio.create_subprocess_exec(sys.executable, __file__, url, schema, str(w), "6", stdout=asyncio.subprocess.PIPE) for w in range(3)]
            # a fold now and then, whole (drop 0) so that nothing goes, and a tiny record that is full
            outs = [json.loads((await p.communicate())[0]) for p in ps]
            acked = [x for o in outs for x in o["acked"]]; unknown = {tuple(x) for o in outs for x in o["unknown"]}
            print("group statements, grouped, alone of each process:", [o["stats"] for o in outs])
            tails = {}
            for n in range(40):
                r = await dr.load(Key("acme:u:memory", f"s{n}"))   # raises Corrupt if size or length are wrong
                tails[f"s{n}"] = [" ".join(e.decode().split(" ")[:3]) for e in r.tail]
            stored = [(k, e) for k, t in tails.items() for e in t]
            there = set(stored); assert len(stored) == len(there), "doubled"; known = {(a, b) for a, b, _ in acked}; places = {k: {e: i for i, e in enumerate(t, 1)} for k, t in tails.items()}
            missing = [x for x in acked if (x[0], x[1]) not in there]
            extra = [x for x in stored if x not in known and x not in unknown]
            wrong = [x for x in acked if places[x[0]].get(x[1]) != x[2]]
            order = 0
            for k, t in tails.items():
                last = {}
                for e in t:
                    w, c, n = e.split(" ")
                    if last.get((w, c), 0) > int(n): order += 1
                    last[w, c] = int(n)
            print("acknowledged", len(acked), "stored", len(stored), "unknown", len(unknown), "missing", len(missing), "extra", len(extra), "length other than place", len(wrong), "out of order", order)
            await dr.close()
        finally:
            server.stop()
if len(sys.argv) > 2: asyncio.run(worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
else: asyncio.run(main())
