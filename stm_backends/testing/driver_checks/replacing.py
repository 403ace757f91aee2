"""Checks of the conditional write, and of folding."""

from __future__ import annotations

from stm_backends.drivers.contract import ABSENT, ANY, Record, new_version
from stm_backends.testing.driver_checks.steps import append_all, loaded
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be


class Replacing(Contract):
    """Checks of the conditional write, and of folding."""

    @check("driver.replace")
    async def test_replace_any_creates_a_record(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        done = await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        must_be(done, True, "ANY is never refused")
        must_be(await driver.load(key), Record("v1", b"body", ()), "there was no record before")

    @check("driver.replace")
    async def test_replace_any_overwrites_the_body_and_empties_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", initial_version="initial", ttl=None)
        done = await driver.replace(key, b"body", version="v2", expect=ANY, ttl=None)
        must_be(done, True, "ANY is never refused")
        must_be(await driver.load(key), Record("v2", b"body", ()), "ANY empties the tail")
        length = await driver.append(key, b"two", initial_version="initial", ttl=None)
        must_be(length, 1, "the tail had been emptied")
        must_be(await driver.load(key), Record("v2", b"body", (b"two",)), "the tail had been emptied")

    @check("driver.replace")
    async def test_replace_absent_only_creates_a_record(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        done = await driver.replace(key, b"mine", version="v1", expect=ABSENT, ttl=None)
        must_be(done, True, "there is no record")
        done = await driver.replace(key, b"theirs", version="v2", expect=ABSENT, ttl=None)
        must_be(done, False, "there is a record")
        must_be(await driver.load(key), Record("v1", b"mine", ()), "the second write was refused")

    @check("driver.replace")
    async def test_a_record_that_only_has_a_tail_is_not_absent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", initial_version="initial", ttl=None)
        done = await driver.replace(key, b"body", version="v2", expect=ABSENT, ttl=None)
        must_be(done, False, "there is a record, although it has no body")
        must_be(await driver.load(key), Record("initial", None, (b"one",)), "the write was refused")

    @check("driver.replace")
    async def test_replace_with_a_version_stores_only_over_that_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        done = await driver.replace(key, b"b", version="v2", expect="v1", ttl=None)
        must_be(done, False, "there is no record of any version")
        must_be(await driver.load(key), None, "the write was refused")
        await driver.replace(key, b"a", version="v1", expect=ANY, ttl=None)
        done = await driver.replace(key, b"b", version="v3", expect="v2", ttl=None)
        must_be(done, False, "the record is of version v1")
        must_be(await driver.load(key), Record("v1", b"a", ()), "the write was refused")
        done = await driver.replace(key, b"b", version="v3", expect="v1", ttl=None)
        must_be(done, True, "the record is of the version expected")
        must_be(await driver.load(key), Record("v3", b"b", ()), "the write was done")

    @check("driver.replace")
    async def test_versions_that_differ_in_one_letter_are_different(self, bench: Bench) -> None:
        """The datastore compares versions as text, without regard to case, or cuts long ones."""
        driver, key = await bench.driver(), bench.key()
        version = f"{new_version()[:-2]}aZ"
        stored = Record(version, b"a", (b"one",))
        await driver.replace(key, b"a", version=version, expect=ANY, ttl=None)
        await driver.append(key, b"one", initial_version="initial", ttl=None)
        for other in (f"{version[:-1]}z", f"{version[:-2]}AZ", f"{version[:-1]}Y", version[:-1]):
            done = await driver.replace(key, b"b", version="v2", expect=other, ttl=None)
            must_be(done, False, "the record is of another version")
            must_be(await driver.delete(key, expect=other), False, "the record is of another version")
            must_be(await driver.load(key), stored, "the version differs, so nothing was changed")
        done = await driver.replace(key, b"b", version=f"{version[:-1]}z", expect=version, ttl=None)
        must_be(done, True, "the record is of the version expected")
        stored = Record(f"{version[:-1]}z", b"b", (b"one",))
        must_be(await driver.load(key), stored, "the version is new, so this was not a retry")

    @check("driver.fold")
    async def test_replace_with_a_version_keeps_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        done = await driver.replace(key, b"body", version="v2", expect="initial", ttl=None)
        must_be(done, True, "the record is of the version expected")
        must_be(await driver.load(key), Record("v2", b"body", (b"a", b"b")), "nothing was to be dropped")

    @check("driver.fold")
    async def test_a_fold_removes_exactly_the_oldest_entries(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b", b"c", b"d")
        done = await driver.replace(key, b"ab", version="v2", expect="initial", drop=2, ttl=None)
        must_be(done, True, "the record is of the version expected")
        must_be(await driver.load(key), Record("v2", b"ab", (b"c", b"d")), "the two oldest were folded")
        length = await driver.append(key, b"e", initial_version="initial", ttl=None)
        must_be(length, 3, "two entries of four had been folded")
        done = await driver.replace(key, b"abcde", version="v3", expect="v2", drop=3, ttl=None)
        must_be(done, True, "the record is of the version expected")
        must_be(await driver.load(key), Record("v3", b"abcde", ()), "all entries were folded")

    @check("driver.fold")
    async def test_a_fold_keeps_entries_appended_since_it_read(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await append_all(one, key, b"a", b"b")
        read = await loaded(one, key)
        await two.append(key, b"c", initial_version="initial", ttl=None)
        done = await one.replace(key, b"ab", version="v2", expect=read.version, drop=2, ttl=None)
        must_be(done, True, "an append since does not change the version")
        must_be(await two.load(key), Record("v2", b"ab", (b"c",)), "only the entries read were folded")

    @check("driver.fold")
    async def test_a_drop_larger_than_the_tail_is_a_lost_race_and_changes_nothing(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        done = await driver.replace(key, b"abc", version="v2", expect="initial", drop=3, ttl=None)
        must_be(done, False, "the tail has two entries, and three were to be dropped")
        must_be(await driver.load(key), Record("initial", None, (b"a", b"b")), "the fold was refused")

    @check("driver.resent")
    async def test_a_retried_replace_returns_true_and_is_applied_once(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b", b"c")
        for _ in range(2):
            done = await driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=None)
            must_be(done, True, "the record carries the version of this write")
        must_be(await driver.load(key), Record("v2", b"a", (b"b", b"c")), "the fold is done once")

    @check("driver.resent")
    async def test_a_write_that_expects_its_own_version_changes_nothing(self, bench: Bench) -> None:
        """The condition is compared before checking whether the write was already done."""
        driver, key, absent = await bench.driver(), bench.key(), bench.key()
        await append_all(driver, key, b"a", b"b", initial_version="v1")
        before = Record("v1", None, (b"a", b"b"))
        for drop, rewrite in ((0, ()), (1, ()), (0, (b"A",))):
            done = await driver.replace(
                key, b"body", version="v1", expect="v1", drop=drop, rewrite=rewrite, ttl=None
            )
            must_be(done, True, "the record carries the version of this write")
            must_be(await driver.load(key), before, "the write counts as done, and is not done again")
        done = await driver.replace(absent, b"body", version="v1", expect="v1", ttl=None)
        must_be(done, False, "there is no record of any version")
        must_be(await driver.load(absent), None, "the write was refused")

    @check("driver.resent")
    async def test_a_retried_lease_request_returns_true(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for _ in range(2):
            done = await driver.replace(key, b"me", version="v1", expect=ABSENT, ttl=None)
            must_be(done, True, "the lease is this caller's")
        must_be(await driver.load(key), Record("v1", b"me", ()), "the lease is taken once")

    @check("driver.resent")
    async def test_a_retried_save_keeps_entries_appended_since(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        done = await driver.replace(key, b"other", version="v1", expect=ANY, ttl=None)
        must_be(done, True, "the record carries the version of this write")
        must_be(await driver.load(key), Record("v1", b"body", (b"a",)), "the write is not done again")

    @check("driver.resent", timed=True)
    async def test_a_retried_write_does_not_change_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=bench.tick)
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(key), None, "a retried write does not change the time to live")
