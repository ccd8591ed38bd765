//! Tests of the parser of the header page, which accepts only pages that this version writes.

use aquifer_pool::FormatError;
use aquifer_pool::layout::{HEADER_BYTES, Layout, SECTIONS_MAX, VERSION};
use proptest::prelude::*;
use std::path::PathBuf;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/header")
}

/// Parses a page. An accepted page must have exactly the bytes that this version writes.
fn parse(bytes: &[u8]) -> Result<Layout, FormatError> {
    let layout = Layout::decode(bytes)?;
    assert_eq!(bytes[..HEADER_BYTES], layout.encode());
    Ok(layout)
}

#[test]
fn the_corpus_is_parsed_as_its_file_names_say() {
    let mut count = 0;
    for entry in std::fs::read_dir(corpus()).expect("the corpus") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let parsed = parse(&std::fs::read(&path).expect("a file"));
        let kind = match &parsed {
            Ok(_) => "good",
            Err(FormatError::Cut { .. }) => "cut",
            Err(FormatError::Magic) => "magic",
            Err(FormatError::Version { .. }) => "version",
            Err(FormatError::Checksum) => "checksum",
            Err(FormatError::Sections { .. }) => "sections",
            Err(FormatError::Node { .. }) => "node",
            Err(FormatError::Unknown { .. }) => "unknown",
            Err(_) => "other",
        };
        assert!(name.starts_with(kind), "{name} was parsed as {parsed:?}");
        count += 1;
    }
    assert!(count >= 12, "only {count} files in the corpus");
}

#[test]
fn a_newer_version_is_refused_by_name() {
    let mut page = Layout::new(1, 1).unwrap().encode();
    page[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    let error = Layout::decode(&page).unwrap_err();
    assert_eq!(error, FormatError::Version { version: VERSION + 1 });
    assert!(error.to_string().contains("version 4"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn headers_are_parsed_as_written(node in any::<u16>(), sections in 1..=SECTIONS_MAX) {
        let layout = Layout::new(node, sections).unwrap();
        prop_assert_eq!(parse(&layout.encode()), Ok(layout));
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        prop_assert!(parse(&bytes).is_err());
    }

    #[test]
    fn one_changed_byte_is_detected(
        at in 0..HEADER_BYTES,
        change in 1..=255_u8,
        sections in 1..=SECTIONS_MAX,
    ) {
        let mut page = Layout::new(3, sections).unwrap().encode();
        page[at] ^= change;
        prop_assert!(parse(&page).is_err());
    }
}
