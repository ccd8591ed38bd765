"""Works on NumPy arrays, with a peak of about --bytes, and prints digests that are the same on every run.

Run by Debian's /usr/bin/python3 with python3-numpy. Only integers and exact sums are printed: how floats are
rounded depends on the processor and on the library's number of threads.
"""

import argparse
import hashlib
import os

# One thread: the order of a parallel sum would not be the same on every run.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np  # noqa: E402 (the threads must be set first)


def digest(name, array):
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    sha = hashlib.sha256()
    for start in range(0, data.size, 1 << 20):
        sha.update(data[start : start + (1 << 20)])
    print(f"{name} {array.dtype} {array.shape} {sha.hexdigest()[:32]}", flush=True)


def sorts(random, count):
    values = random.integers(0, 1 << 62, size=count, dtype=np.int64)
    digest("drawn", values)
    order = np.argsort(values, kind="stable")
    digest("sorted", values[order])
    back = np.empty_like(order)
    back[order] = np.arange(count)
    digest("ranks", back)
    values.sort(kind="quicksort")
    assert (np.diff(values) >= 0).all(), "a sorted array is not in order"
    return values


def indexing(random, values):
    places = random.integers(0, values.size, size=values.size // 2)
    digest("gathered", values[places])
    np.add.at(values, places[: 1 << 16], 1)
    values[places[places % 7 == 0]] ^= 0x55
    digest("scattered", values)
    digest("strided", values[::513])
    digest("reversed", values[::-1])


def blocks(random, side):
    """Multiplies matrices of small whole numbers in blocks: exact in float64, in whatever order."""
    left = random.integers(-8, 8, size=(side, side)).astype(np.float64)
    right = random.integers(-8, 8, size=(side, side)).astype(np.float64)
    product = np.zeros((side, side))
    step = max(side // 6, 1)
    for row in range(0, side, step):
        for column in range(0, side, step):
            for inner in range(0, side, step):
                product[row : row + step, column : column + step] += (
                    left[row : row + step, inner : inner + step]
                    @ right[inner : inner + step, column : column + step]
                )
    whole = product.astype(np.int64)
    assert (whole == product).all(), "a product of whole numbers is not whole"
    digest("product", whole)
    digest("transposed", whole.T)
    print("trace", int(np.trace(whole)), "sum", int(whole.sum()))


def churn(random, count):
    """Arrays that come and go, so that malloc maps and unmaps."""
    kept = []
    for step in range(24):
        kept.append(np.full(count // 24, step, dtype=np.int64) + random.integers(0, 9, size=count // 24))
        if step % 3 == 2:
            kept.pop(int(random.integers(0, len(kept))))
    digest("churned", np.concatenate(kept))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=300 << 20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = np.random.Generator(np.random.PCG64(options.seed))
    # At the peak, the sort has three arrays and a scratch array of this many 8-byte numbers.
    # Python and NumPy themselves take some 40 MB.
    count = (options.bytes - (40 << 20)) // 8 // 4
    indexing(random, sorts(random, count))
    # Small beside the rest: without a fast BLAS the product would take most of the time.
    blocks(random, int((options.bytes / 8 / 48) ** 0.5) // 6 * 6)
    churn(random, count)


if __name__ == "__main__":
    main()
