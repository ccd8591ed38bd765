//! Golden JSON of `docs/formats/ipc.md`: the keeper's record of a session.
//! A changed golden file needs a changed document. A new field needs a default, because an agent of
//! another build reads the record.

use aquifer_tests_support::golden;

use super::SessionRecord;

#[test]
fn golden_record_of_a_session() {
    let mut golden = golden!("record");
    let record = SessionRecord { tenant: 1, pid: 2, version: 3 };
    let text = serde_json::to_string(&record).expect("numbers can be written");
    assert_eq!(serde_json::from_str::<SessionRecord>(&text).expect("the record was just written"), record);
    golden.text("session", &text);
    golden.check();
}
