"""Fills a running redis-server, reads all data back, changes a part, saves, and prints a digest.

    redis_check.py --port P load [--bytes 150M]
        fill the server, read all back, BGSAVE and wait for it, print the digest
    redis_check.py --port P verify [--bytes …]
        read all back from a server that has loaded the dump; the digest is the same

Both print the same lines, so that the outputs can be compared. `--bytes` is roughly the memory of
the filled server. Implements the protocol itself, so it needs only Python.
"""

import argparse
import hashlib
import socket
import time

BATCH = 256
VALUE_BYTES = 700
# Waiting for a save ends with an error after this long: a save that hangs must not hang the test.
SAVE_SECONDS_MAX = 300


class Redis:
    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.reader = self.socket.makefile("rb")

    def pipeline(self, commands):
        data = bytearray()
        for command in commands:
            data += b"*%d\r\n" % len(command)
            for part in command:
                part = part if isinstance(part, bytes) else str(part).encode()
                data += b"$%d\r\n%s\r\n" % (len(part), part)
        self.socket.sendall(data)
        return [self.reply() for _ in commands]

    def command(self, *parts):
        return self.pipeline([parts])[0]

    def reply(self):
        line = self.reader.readline()
        if not line.endswith(b"\r\n"):
            raise SystemExit("redis-server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise SystemExit(f"redis-server refused: {rest.decode()}")
        if kind == b":":
            return int(rest)
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self.reader.read(size + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise SystemExit(f"a reply that is not of the protocol: {line!r}")

    def info(self, section):
        lines = self.command("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def value(seed, key, version):
    return hashlib.shake_128(f"{seed}/{key}/{version}".encode()).digest(VALUE_BYTES)


def version_of(key):
    """Every third key is written a second time, while the save goes on; every eleventh is deleted."""
    return 1 if key % 3 == 0 else 0


def batches(count):
    return (range(start, min(start + BATCH, count)) for start in range(0, count, BATCH))


def fill(redis, seed, count):
    for keys in batches(count):
        redis.pipeline([("SET", f"key:{key}", value(seed, key, 0)) for key in keys])
        redis.pipeline([("HSET", f"hash:{key % 97}", key, key * key) for key in keys if key % 5 == 0])
        ranked = [key for key in keys if key % 9 == 0]
        redis.pipeline([("ZADD", "ranking", key * 7919 % 100003, f"member:{key}") for key in ranked])


def check_values(redis, seed, count, version_of_key):
    wrong = 0
    for keys in batches(count):
        found = redis.pipeline([("GET", f"key:{key}") for key in keys])
        for key, data in zip(keys, found):
            version = version_of_key(key)
            expected = None if version is None else value(seed, key, version)
            if data != expected:
                wrong += 1
                if wrong <= 5:
                    start, expected_start = data and data[:16], expected and expected[:16]
                    print(f"key:{key} is wrong: {start!r}, expected {expected_start!r}")
    if wrong:
        raise SystemExit(f"{wrong} of {count} values are wrong")


def final_version(key):
    return None if key % 11 == 7 else version_of(key)


def change(redis, seed, count):
    for keys in batches(count):
        redis.pipeline([("SET", f"key:{key}", value(seed, key, 1)) for key in keys if version_of(key) == 1])
        redis.pipeline([("DEL", f"key:{key}") for key in keys if key % 11 == 7])


def save(redis, meanwhile=None):
    """BGSAVE, and what is done while the forked child writes the dump."""
    redis.command("BGSAVE")
    if meanwhile:
        meanwhile()
    deadline = time.monotonic() + SAVE_SECONDS_MAX
    while True:
        info = redis.info("persistence")
        if info["rdb_bgsave_in_progress"] == "0":
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"BGSAVE did not end within {SAVE_SECONDS_MAX} s")
        time.sleep(0.05)
    if info["rdb_last_bgsave_status"] != "ok":
        raise SystemExit("BGSAVE failed; see the server's log")


def digests(redis):
    keys = redis.command("DBSIZE")
    sha = hashlib.sha256()
    for index in range(97):
        fields = redis.command("HGETALL", f"hash:{index}")
        sha.update(repr(sorted(zip(fields[::2], fields[1::2]))).encode())
    sha.update(repr(redis.command("ZRANGE", "ranking", 0, -1, "WITHSCORES")).encode())
    print(f"keys {keys}")
    print(f"hashes and ranking {sha.hexdigest()[:32]}")
    print(f"digest {redis.command('DEBUG', 'DIGEST').decode()}", flush=True)


def parse_size(text):
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    return int(text[:-1]) << unit if unit else int(text)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("step", choices=["load", "verify"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes", type=parse_size, default=150 << 20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    redis = Redis(options.port)
    # A key takes about this much, with redis's own tables.
    count = options.bytes // 930
    if options.step == "load":
        fill(redis, options.seed, count)
        check_values(redis, options.seed, count, lambda key: 0)
        # The first dump is taken while the values change, the second holds them all.
        save(redis, meanwhile=lambda: change(redis, options.seed, count))
        save(redis)
    check_values(redis, options.seed, count, final_version)
    digests(redis)


if __name__ == "__main__":
    main()
