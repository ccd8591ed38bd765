"""Trains a model of scikit-learn on an array of --bytes, and prints digests that are the same on
every run.

Run by Debian's /usr/bin/python3 with python3-sklearn.
"""

import argparse
import hashlib
import os

# One thread: the order of a parallel sum would not be the same on every run.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402 (the threads must be set first)

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


def classes(random, data):
    """Two classes, which a hyperplane separates for the most part."""
    normal = random.normal(size=FEATURES)
    return (data @ normal + random.normal(0, 20, size=len(data)) > 0).astype(np.int8)


def digest(values, dtype=np.float64):
    return hashlib.sha256(np.ascontiguousarray(values, dtype=dtype)).hexdigest()


def kmeans(random, data, rounds):
    from sklearn.cluster import KMeans

    # It stops after so many rounds, not when it is good enough.
    means = KMeans(
        n_clusters=CLUSTERS, init=data[:CLUSTERS].copy(), n_init=1, max_iter=rounds, tol=0,
        algorithm="lloyd", copy_x=False,
    )
    labels = means.fit_predict(data)
    print("labels", digest(labels, np.int32), "centres", digest(means.cluster_centers_))
    print("iterations", means.n_iter_, "inertia", repr(float(means.inertia_)))


def logistic(random, data, rounds):
    import warnings

    from sklearn.linear_model import LogisticRegression

    warnings.simplefilter("ignore")  # that it stops before it is good enough
    model = LogisticRegression(max_iter=rounds, tol=0).fit(data, classes(random, data))
    print("coefficients", digest(model.coef_), "iterations", model.n_iter_)


def boosting(random, data, rounds):
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(max_iter=rounds, early_stopping=False, random_state=1)
    model.fit(data, classes(random, data))
    print("predictions", digest(model.predict_proba(data[::16])), "iterations", model.n_iter_)


def forest(random, data, rounds):
    from sklearn.ensemble import RandomForestClassifier

    model = RandomForestClassifier(n_estimators=rounds, max_depth=6, max_samples=0.02, random_state=1)
    model.fit(data, classes(random, data))
    print("predictions", digest(model.predict_proba(data[::16])), "trees", len(model.estimators_))


MODELS = {"kmeans": kmeans, "logistic": logistic, "boosting": boosting, "forest": forest}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="iterations, or trees")
    options = parser.parse_args()
    random = np.random.Generator(np.random.PCG64(1))
    MODELS[options.model](random, points(random, options.bytes // 8 // FEATURES), options.rounds)


if __name__ == "__main__":
    main()
