//! Size of the metadata of a node with 64 GiB.

use std::collections::BTreeMap;

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_pool::layout::{Layout, SECTION_ENTRIES};
use aquifer_pool::size::SECTION_CHUNKS;

/// Sections of 64 GiB.
const SECTIONS: u32 = 32_768;
/// Bytes of the keys of a section. Its logs have the same size.
const ENTRIES_BYTES: u64 = SECTION_ENTRIES as u64 * 8;

/// Sizes of the parts of a node's region.
struct Parts {
    /// Control words, the header, and unused memory before the data.
    words: u64,
    keys: u64,
    logs: u64,
    data: u64,
}

fn parts() -> Parts {
    let layout = Layout::new(1, SECTIONS).expect("64 GiB fit");
    let (data, entries) = (layout.data_bytes(), u64::from(SECTIONS) * ENTRIES_BYTES);
    Parts { words: layout.region_bytes() - data - 2 * entries, keys: entries, logs: entries, data }
}

/// Metadata of the pool in percent of the memory.
pub fn percent() -> f64 {
    let Parts { words, keys, logs, data } = parts();
    float(words + keys + logs) / float(data) * 100.0
}

/// The table. The free lists of an RPC server are in its heap, and not counted.
pub fn table() -> Table {
    let Parts { words, keys, logs, data } = parts();
    let array = u64::from(SECTIONS * SECTION_CHUNKS) * 8;
    let row = |name: &str, bytes: u64| {
        let figures = [("bytes", float(bytes)), ("% of the memory", float(bytes) / float(data) * 100.0)];
        let figures = figures.into_iter().filter_map(|(name, value)| Some((name, Spread::of(&[value])?)));
        Row { name: name.into(), figures: figures.collect::<BTreeMap<_, _>>() }
    };
    Table {
        title: "metadata of a node of 64 GiB".into(),
        columns: ["bytes", "% of the memory"].map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows: vec![
            row("ours", words + keys + logs),
            row("of these header and control words", words),
            row("of these keys, which are the windows", keys),
            row("of these the full log", logs),
            row("one-sided array, no keys, no log", array),
        ],
    }
}
