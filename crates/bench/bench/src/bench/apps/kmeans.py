"""Clusters points with scikit-learn's k-means, in an array of --bytes, and prints digests that are
the same on every run.

Run by Debian's /usr/bin/python3 with python3-sklearn.
"""

import argparse
import hashlib
import os

# One thread: the order of a parallel sum would not be the same on every run.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402 (the threads must be set first)
from sklearn.cluster import KMeans  # noqa: E402

FEATURES = 16
CLUSTERS = 8
# Points are made in pieces, so that there never is a second array of that size.
PIECE = 4096


def points(random, count):
    data = np.empty((count, FEATURES), dtype=np.float64)
    centres = random.uniform(-10, 10, size=(CLUSTERS, FEATURES))
    for start in range(0, count, PIECE):
        piece = data[start : start + PIECE]
        which = random.integers(0, CLUSTERS, size=len(piece))
        piece[:] = centres[which] + random.normal(0, 8, size=piece.shape)
    return data


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    random = np.random.Generator(np.random.PCG64(1))
    data = points(random, options.bytes // 8 // FEATURES)
    # It stops after so many iterations, not when it is good enough.
    means = KMeans(
        n_clusters=CLUSTERS, init=data[:CLUSTERS].copy(), n_init=1, max_iter=options.iterations, tol=0,
        algorithm="lloyd", copy_x=False,
    )
    labels = means.fit_predict(data)
    print("labels", hashlib.sha256(np.ascontiguousarray(labels, dtype=np.int32)).hexdigest())
    print("centres", hashlib.sha256(np.ascontiguousarray(means.cluster_centers_)).hexdigest())
    print("iterations", means.n_iter_, "inertia", repr(float(means.inertia_)))


if __name__ == "__main__":
    main()
