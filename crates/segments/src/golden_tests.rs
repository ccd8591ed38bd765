//! The form of what others read: see `docs/formats/segments.md`.

use crate::ownership::{Life, SegmentRecord};

#[test]
fn golden_record() {
    let (owner, to) = (Life { host: 1, epoch: 2 }, Life { host: 3, epoch: 4 });
    let record = SegmentRecord { owner, generation: 5, intent: Some(to) };
    let json = r#"{"owner":{"host":1,"epoch":2},"generation":5,"intent":{"host":3,"epoch":4}}"#;
    assert_eq!(serde_json::to_string(&record).unwrap(), json);
    assert_eq!(serde_json::from_str::<SegmentRecord>(json).unwrap(), record);
    let json = r#"{"owner":{"host":1,"epoch":2},"generation":0,"intent":null}"#;
    assert_eq!(serde_json::to_string(&SegmentRecord::new(owner)).unwrap(), json);
}
