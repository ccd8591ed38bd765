//! The form of what others read: see `docs/formats/segments.md`.

use crate::host::SegmentKey;
use crate::host::ranges::RangesRecord;
use crate::host::wire::{Answer, Ask, CopyPlace, Request};
use crate::ownership::{Life, SegmentRecord};
use crate::pulling::Link;

#[test]
fn golden_record() {
    let (owner, to) = (Life { host: 1, epoch: 2 }, Life { host: 3, epoch: 4 });
    let record = SegmentRecord { owner, generation: 5, intent: Some(to) };
    let json = r#"{"owner":{"host":1,"epoch":2},"generation":5,"intent":{"host":3,"epoch":4}}"#;
    assert_eq!(serde_json::to_string(&record).unwrap(), json);
    assert_eq!(serde_json::from_str::<SegmentRecord>(json).unwrap(), record);
    let json = r#"{"owner":{"host":1,"epoch":2},"generation":0,"intent":null}"#;
    assert_eq!(serde_json::to_string(&SegmentRecord::new(owner, 0)).unwrap(), json);
}

#[test]
fn golden_ranges() {
    let mut record = RangesRecord::default();
    record.remove(1, 3);
    record.grant(7, 4096).unwrap();
    record.grant(8, 1 << 30).unwrap();
    let json = r#"{"generation":3,"ranges":{"7":[52776558133248,4096],"8":[52777631875072,1073741824]}}"#;
    assert_eq!(serde_json::to_string(&record).unwrap(), json);
    assert_eq!(serde_json::from_str::<RangesRecord>(json).unwrap(), record);
}

#[test]
fn golden_messages() {
    let (from, to) = (Life { host: 1, epoch: 2 }, Life { host: 3, epoch: 4 });
    let (segment, address) = (SegmentKey { tenant: 6, id: 7 }, "127.0.0.1:8".parse().unwrap());
    let link = Link { at: from, generation: 9 };
    let copies = vec![CopyPlace { link, address, data: (10, 11), present: (12, 13) }];
    let head =
        r#"{"segment":{"tenant":6,"id":7},"from":{"host":1,"epoch":2},"to":{"host":3,"epoch":4},"ask":"#;
    let link_json = r#"{"at":{"host":1,"epoch":2},"generation":9}"#;
    let copy = format!(r#"{{"link":{link_json},"address":"127.0.0.1:8","data":[10,11],"present":[12,13]}}"#);
    for (ask, golden) in [
        (
            Ask::Prepare { generation: 5, bytes: 4096, address: 8192, process: "p".into() },
            r#"{"prepare":{"generation":5,"bytes":4096,"address":8192,"process":"p"}}"#.to_owned(),
        ),
        (
            Ask::Transfer { generation: 5, copies },
            format!(r#"{{"transfer":{{"generation":5,"copies":[{copy}]}}}}"#),
        ),
        (Ask::Query { generation: 5 }, r#"{"query":{"generation":5}}"#.to_owned()),
        (Ask::Release { generation: 5 }, r#"{"release":{"generation":5}}"#.to_owned()),
    ] {
        let request = Request { segment, from, to, ask };
        let json = format!("{head}{golden}}}");
        assert_eq!(serde_json::to_string(&request).unwrap(), json);
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), request);
    }
    let answers = [Answer::Accept, Answer::Decline, Answer::Received, Answer::NotReceived, Answer::Done];
    let json = r#"["accept","decline","received","not_received","done"]"#;
    assert_eq!(serde_json::to_string(&answers).unwrap(), json);
}
