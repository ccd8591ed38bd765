//! Golden bytes of `docs/formats/pool.md`: header, tables, control words, log entries.
//! A changed golden file needs a new version there ([`VERSION`]).

use aquifer_fabric::{Host, KeyTable};
use aquifer_tests_support::golden;

use crate::cache::NodeCache;
use crate::layout::{
    HEADER_BYTES, KEY_ENTRY_BYTES, LOG_ENTRY_BYTES, Layout, MAGIC, NodeClass, SECTION_ENTRIES, SECTIONS_MAX,
    VERSION,
};
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_BYTES, SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{AlignedRun, InlineLog, LogEntry, LogOp, SectionWord, SpanState, SpanWord};

const HOST: Host = Host(0xabc);

fn run(first: u8, order: u8) -> AlignedRun {
    AlignedRun::new(first, order).expect("the run is aligned")
}

#[test]
fn golden_header_and_tables() {
    let mut golden = golden!("layout");
    let disk = Layout::new(2, 1).expect("one section is valid").of_class(NodeClass::Disk);
    assert_eq!(Layout::decode(&disk.encode()), Ok(disk));
    golden.text("header", "node 2, sections 1, on a disk");
    golden.memory(&disk.encode());
    for (node, sections) in [(0, 1), (0x0102, 0x0304), (u16::MAX, SECTIONS_MAX)] {
        let layout = Layout::new(node, sections).expect("the number of sections is valid");
        let page = layout.encode();
        assert_eq!(Layout::decode(&page), Ok(layout));
        golden.text("header", &format!("node {node}, sections {sections}"));
        golden.memory(&page);
        let last = sections - 1;
        let places = [
            ("section", WordAt::Section(last)),
            ("span", WordAt::Span(layout.spans() - 1)),
            ("key of the last section", WordAt::section_key(last)),
            ("last key", WordAt::Key(sections * SECTION_ENTRIES - 1)),
            ("last log", WordAt::Log(sections * SECTION_ENTRIES - 1)),
        ];
        golden.text("figures", &layout.figures_at().to_string());
        for (name, at) in places {
            golden.text(name, &layout.word_at(at).to_string());
        }
        golden.text("data", &layout.data_at().to_string());
        golden.text("data of the last section", &layout.section_data_at(last).to_string());
        golden.text("data of the last chunk", &layout.chunk_data_at(layout.chunks() - 1).to_string());
        golden.text("bytes of the region", &layout.region_bytes().to_string());
        let KeyTable { entries_at, data } = layout.key_table();
        golden.text("table of keys", &format!("at {entries_at}, for {} to {}", data.start, data.end));
    }
    golden.text("magic", std::str::from_utf8(&MAGIC).expect("the magic number is ASCII"));
    golden.text("version", &VERSION.to_string());
    golden.text("bytes of a header", &HEADER_BYTES.to_string());
    golden.text("entries", &format!("keys {KEY_ENTRY_BYTES} bytes, logs {LOG_ENTRY_BYTES} bytes"));
    golden.text(
        "sizes",
        &format!(
            "chunk {CHUNK_BYTES} bytes, span {SPAN_CHUNKS} chunks, section {SECTION_SPANS} spans, \
             {SECTION_CHUNKS} chunks, {SECTION_BYTES} bytes"
        ),
    );
    let classes =
        (0..=u8::MAX).map_while(SizeClass::new).map(|class| format!("{}:{}", class.k(), class.bytes()));
    golden.text("classes", &classes.collect::<Vec<_>>().join(" "));
    golden.check();
}

#[test]
fn golden_section_words() {
    let mut golden = golden!("section-words");
    let opened = SectionWord::default().open(3, HOST);
    let allocated = opened.allocate(run(8, 3), HOST);
    let words = [
        ("new", SectionWord::default()),
        ("offline", SectionWord::OFFLINE),
        ("span 3 opened", opened),
        ("spans 8 to 15 allocated", allocated),
        ("span 3 contended", allocated.hint(3, SpanState::Contended)),
        ("span 3 full", allocated.hint(3, SpanState::Full)),
        ("span 4 opened beside 3, which is full", allocated.open_beside(4, 3, HOST)),
        ("spans 8 to 15 freed", allocated.free(run(8, 3), HOST)),
        ("span 3 closed", opened.close(3, HOST)),
        ("allocated whole", SectionWord::default().allocate(AlignedRun::SECTION, Host(1))),
    ];
    for (name, word) in words {
        word.check().expect(name);
        golden.bytes(name, &word.0.to_le_bytes());
    }
    // Read back from bytes, not from what has just been made.
    let read = |bytes: [u8; 8]| SectionWord(u64::from_le_bytes(bytes));
    let word = read(allocated.0.to_le_bytes());
    let log = InlineLog { op: LogOp::Alloc, run: run(8, 3), host: HOST, stamp: 2 };
    assert_eq!(word.log(), Ok(Some(log)));
    assert_eq!(
        (word.state(3), word.state(8), word.state(0)),
        (SpanState::Partial, SpanState::Full, SpanState::Empty)
    );
    golden.check();
}

#[test]
fn golden_span_words() {
    let mut golden = golden!("span-words");
    let first = SpanWord::default().allocate(run(4, 2), HOST);
    let full = first.allocate(run(16, 4), HOST);
    let words = [
        ("new", SpanWord::default()),
        ("chunks 4 to 7 allocated", first),
        ("chunks 16 to 31 allocated", full),
        ("chunks 4 to 7 freed", full.free(run(4, 2), HOST)),
        ("the last freed", first.free(run(4, 2), HOST)),
        ("all of a dead host freed", full.free_mask(0xffff_0000, run(16, 4), Host(4095))),
        ("ready", first.free(run(4, 2), HOST).mark_ready(HOST)),
        ("chunk 31 allocated", SpanWord::default().allocate(run(31, 0), Host(1))),
    ];
    for (name, word) in words {
        word.check().expect(name);
        golden.bytes(name, &word.0.to_le_bytes());
    }
    let word = SpanWord(u64::from_le_bytes(full.0.to_le_bytes()));
    let log = InlineLog { op: LogOp::Alloc, run: run(16, 4), host: HOST, stamp: 2 };
    assert_eq!((word.log(), word.bits()), (Ok(Some(log)), 0xffff_00f0));

    let entry = LogEntry::of(full.0, 0x0102_0304);
    golden.bytes("entry of the log", &entry.0.to_le_bytes());
    assert_eq!(entry.of_span(), Ok(Some(log)));
    assert!(entry.is_record_of(full.0));
    golden.check();
}

#[test]
fn golden_places_of_entries() {
    let mut golden = golden!("entries");
    let layout = Layout::new(1, 3).expect("the number of sections is valid");
    let places = [
        ("key of section 1", WordAt::section_key(1)),
        ("key of span 17", WordAt::span_key(17)),
        ("key of chunk 513", WordAt::chunk_key(513)),
        ("log of span 17", WordAt::span_entry(17)),
        ("log of chunk 513", WordAt::chunk_entry(513)),
    ];
    for (name, at) in places {
        golden.text(name, &layout.word_at(at).to_string());
    }
    golden.bytes("number of a writer", &NodeCache::nonce_of(HOST, 0x0102_0304).to_le_bytes());
    golden.check();
}
