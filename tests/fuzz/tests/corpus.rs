//! Each target runs on each file of its corpus.
//!
//! A corpus has seeds, which the product's encoders write, and what the fuzzer has found beside
//! them. If a format changes, run this test with `AQUIFER_WRITE_GOLDEN=1`: it writes the seeds
//! again. Then run `scripts/fuzz.sh`, and replace the other files as CONTRIBUTING.md says.

#![cfg(debug_assertions)]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use aquifer_tests_fuzz::{TARGETS, Target};
use aquifer_tests_support::golden::WRITE_VARIABLE;

/// Beginning of the names of seeds.
const SEED: &str = "seed-";
/// Most bytes of a file.
const FILE_BYTES_MAX: usize = 4096;

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// The names in a folder. All of them must be files, or all folders.
fn names(folder: &Path, are_folders: bool) -> BTreeSet<String> {
    let entries =
        std::fs::read_dir(folder).unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
    entries
        .map(|entry| {
            let entry = entry.expect("a folder's entry can be read");
            let kind = entry.file_type().expect("an entry has a type");
            assert_eq!(kind.is_dir(), are_folders, "{} is of another type", entry.path().display());
            entry.file_name().into_string().expect("names are UTF-8")
        })
        .collect()
}

/// The files of a target's corpus, with their names.
fn files(target: &Target) -> Vec<(String, Vec<u8>)> {
    let folder = corpora().join(target.name);
    let read = |name: String| {
        let path = folder.join(&name);
        let bytes =
            std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        (name, bytes)
    };
    names(&folder, false).into_iter().map(read).collect()
}

fn is_writing() -> bool {
    std::env::var_os(WRITE_VARIABLE).is_some_and(|value| value == "1")
}

#[test]
fn each_target_has_a_corpus_and_each_corpus_a_target() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(targets.len(), TARGETS.len(), "names are unique");
    assert_eq!(names(&corpora(), true), targets);
}

#[test]
fn the_corpora_break_no_target() {
    for target in TARGETS {
        let files = files(target);
        assert!(!files.is_empty(), "the corpus of {} is empty", target.name);
        for (name, bytes) in &files {
            assert!(bytes.len() <= FILE_BYTES_MAX, "{}/{name} is long", target.name);
            let run = catch_unwind(|| (target.run)(bytes));
            assert!(run.is_ok(), "corpus/{}/{name} breaks its target", target.name);
        }
    }
}

#[test]
fn seeds_are_current_and_accepted() {
    for target in TARGETS {
        let folder = corpora().join(target.name);
        let seeds: Vec<(String, Vec<u8>)> =
            (target.seeds)().into_iter().map(|(name, bytes)| (format!("{SEED}{name}"), bytes)).collect();
        for (name, bytes) in &seeds {
            assert!((target.run)(bytes), "{}: {name} is not accepted", target.name);
            if is_writing() {
                std::fs::create_dir_all(&folder)
                    .and_then(|()| std::fs::write(folder.join(name), bytes))
                    .unwrap_or_else(|error| panic!("cannot write {name}: {error}"));
            }
        }
        let mut found = files(target);
        found.retain(|(name, _)| name.starts_with(SEED));
        let name = |(name, _): &(String, Vec<u8>)| name.clone();
        let listed: BTreeSet<String> = seeds.iter().map(name).collect();
        assert_eq!(found.iter().map(name).collect::<BTreeSet<_>>(), listed, "seeds of {}", target.name);
        for seed in &seeds {
            let is_current = found.contains(seed);
            assert!(is_current, "{}: {} differs; run with {WRITE_VARIABLE}=1", target.name, seed.0);
        }
    }
}

/// The corpora must not notice the mutations, or the search in `make test-long` would show nothing.
#[test]
fn the_corpora_alone_notice_no_mutation() {
    for target in TARGETS {
        for (name, bytes) in files(target) {
            let run = || {
                (target.with_mutation)(&mut || {
                    (target.run)(&bytes);
                });
            };
            let is_noticed = catch_unwind(AssertUnwindSafe(run)).is_err();
            assert!(!is_noticed, "remove corpus/{}/{name}: it notices the mutation", target.name);
        }
    }
}
