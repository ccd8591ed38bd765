"""Fills an SQLite database in memory, indexes, joins and changes it, with a peak of about --bytes.
Prints digests that are the same on every run. Needs only Python."""

import argparse
import hashlib
import random
import sqlite3

WORDS = (
    "amber basalt cedar delta ember fjord garnet harbour indigo jasper kelp lagoon marble nectar onyx"
).split()


def rows(numbers, count):
    for key in range(count):
        words = " ".join(numbers.choice(WORDS) for _ in range(numbers.randrange(3, 12)))
        yield key, numbers.randrange(count), f"{words} {numbers.getrandbits(64):016x}", numbers.randbytes(180)


def digest(database, name, query, parameters=()):
    sha = hashlib.sha256()
    count = 0
    for row in database.execute(query, parameters):
        sha.update(repr(row).encode())
        count += 1
    print(f"{name} {count} rows {sha.hexdigest()[:32]}", flush=True)


def fill(database, numbers, count):
    database.execute("CREATE TABLE item(id INTEGER PRIMARY KEY, parent INTEGER, text TEXT, data BLOB)")
    database.executemany("INSERT INTO item VALUES(?, ?, ?, ?)", rows(numbers, count))
    database.execute("CREATE INDEX item_text ON item(text)")
    database.execute("CREATE INDEX item_parent ON item(parent, id)")
    database.commit()
    digest(database, "filled", "SELECT count(*), sum(parent), sum(length(text)) FROM item")


def look(database, numbers, count):
    digest(database, "in order", "SELECT id, text FROM item ORDER BY text LIMIT 20000")
    digest(
        database,
        "joined",
        "SELECT a.id, count(b.id), min(b.text) FROM item a JOIN item b ON b.parent = a.id"
        " GROUP BY a.id LIMIT 20000",
    )
    sha = hashlib.sha256()
    for _ in range(20000):
        number = (numbers.randrange(count),)
        sha.update(database.execute("SELECT data FROM item WHERE id = ?", number).fetchone()[0])
    print("looked up", sha.hexdigest()[:32], flush=True)


def change(database, count):
    database.execute("UPDATE item SET text = text || ' again' WHERE id % 5 = 0")
    database.execute("DELETE FROM item WHERE id % 7 = 3")
    database.commit()
    database.execute("BEGIN")
    database.execute("UPDATE item SET parent = -parent WHERE id < ?", (count // 4,))
    database.rollback()
    digest(database, "changed", "SELECT id, parent, text FROM item WHERE id % 11 = 0 ORDER BY id")
    database.execute("VACUUM")
    digest(
        database,
        "by start",
        "SELECT substr(text, 1, 8) AS start, count(*) FROM item GROUP BY start ORDER BY start",
    )
    digest(database, "whole", "SELECT * FROM item ORDER BY id")
    print("integrity", database.execute("PRAGMA integrity_check").fetchone()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=200 << 20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    numbers = random.Random(options.seed)
    # A row takes about 1080 bytes at the peak: with its share of the indexes, and a
    # second time while VACUUM copies it.
    count = options.bytes // 1080
    # Explicit transactions: when the module begins some itself depends on its version.
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute("BEGIN")
    fill(database, numbers, count)
    look(database, numbers, count)
    database.execute("BEGIN")
    change(database, count)


if __name__ == "__main__":
    main()
