//! Golden tests of the formats in `docs/formats/segments.md`.

use std::fmt::Debug;

use aquifer_arena::calls::{Call, SegmentStatus, SegmentTotals, Tenure, TimeSummary};
use aquifer_arena::copies::{CopyRecord, CopyTree, FormerRoot, WordPair};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::host::SegmentKey;
use crate::host::ranges::RangesRecord;
use crate::host::wire::{Answer, Ask, CopyPlace, Request};
use crate::pulling::Link;
use aquifer_ownership::{Life, SegmentRecord};

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
    let place = CopyPlace { link, address, data: (10, 11), present: (12, 13) };
    let copies = vec![place];
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
        (
            Ask::Fence { source: Life { host: 8, epoch: 9 }, generation: 5 },
            r#"{"fence":{"source":{"host":8,"epoch":9},"generation":5}}"#.to_owned(),
        ),
        (Ask::Release { generation: 5 }, r#"{"release":{"generation":5}}"#.to_owned()),
        (Ask::Place { generation: 5 }, r#"{"place":{"generation":5}}"#.to_owned()),
    ] {
        let request = Request { segment, from, to, ask };
        let json = format!("{head}{golden}}}");
        assert_eq!(serde_json::to_string(&request).unwrap(), json);
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), request);
    }
    let answers = [Answer::Accept, Answer::Decline, Answer::Received, Answer::NotReceived, Answer::Done];
    let json = r#"["accept","decline","received","not_received","done"]"#;
    assert_eq!(serde_json::to_string(&answers).unwrap(), json);
    let json = format!(r#"{{"place":{copy}}}"#);
    assert_eq!(serde_json::to_string(&Answer::Place(place)).unwrap(), json);
    assert_eq!(serde_json::from_str::<Answer>(&json).unwrap(), Answer::Place(place));
}

fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, json: &str) {
    assert_eq!(serde_json::to_string(value).unwrap(), json);
    assert_eq!(&serde_json::from_str::<T>(json).unwrap(), value);
}

#[test]
fn golden_calls() {
    let process = || "p".to_owned();
    let tenure = Tenure { generation: 8, passes: 9 };
    for (call, json) in [
        (
            Call::Open { process: process(), held: vec![(7, tenure)] },
            r#"{"open":{"process":"p","held":[[7,{"generation":8,"passes":9}]]}}"#,
        ),
        (Call::Attend { process: process() }, r#"{"attend":{"process":"p"}}"#),
        (Call::KeepAlive, r#""pulse""#),
        (Call::Allocate { id: 7, bytes: 4096 }, r#"{"allocate":{"id":7,"bytes":4096}}"#),
        (Call::Deallocate { id: 7, is_repeated: true }, r#"{"deallocate":{"id":7,"is_repeated":true}}"#),
        (Call::GiveUp { id: 7 }, r#"{"give_up":{"id":7}}"#),
        (Call::Connect { id: 7, process: process() }, r#"{"connect":{"id":7,"process":"p"}}"#),
        (Call::Abort { id: 7 }, r#"{"abort":{"id":7}}"#),
        (
            Call::Transfer { id: 7, tenure, is_repeated: true },
            r#"{"transfer":{"id":7,"tenure":{"generation":8,"passes":9},"is_repeated":true}}"#,
        ),
        (Call::Receive { timeout_ms: 5, requests: true }, r#"{"receive":{"timeout_ms":5,"requests":true}}"#),
        (Call::Serve { id: 7, pulls: true }, r#"{"serve":{"id":7,"pulls":true}}"#),
        (Call::Pull { id: 7, offset: 8, bytes: 9 }, r#"{"pull":{"id":7,"offset":8,"bytes":9}}"#),
        (Call::Close { id: 7 }, r#"{"close":{"id":7}}"#),
        (Call::Discard { id: 7 }, r#"{"discard":{"id":7}}"#),
        (Call::List { above: None }, r#"{"list":{"above":null}}"#),
        (Call::Report { above: Some((6, 7)) }, r#"{"report":{"above":[6,7]}}"#),
        (Call::Move { user: 6, id: 7, process: process() }, r#"{"move":{"user":6,"id":7,"process":"p"}}"#),
        (Call::Free { user: 6, id: 7 }, r#"{"free":{"user":6,"id":7}}"#),
        (Call::ReportCopies { above: None }, r#"{"report_copies":{"above":null}}"#),
        (Call::Copies { id: 7 }, r#"{"copies":{"id":7}}"#),
        (
            Call::SetCopies { id: 7, revision: 1, record: None },
            r#"{"set_copies":{"id":7,"revision":1,"record":null}}"#,
        ),
        (Call::Restore { id: 7 }, r#"{"restore":{"id":7}}"#),
        (Call::Restored { id: 7, is_repeated: false }, r#"{"restored":{"id":7,"is_repeated":false}}"#),
    ] {
        check(&call, json);
    }
}

#[test]
fn golden_copies() {
    use aquifer_arena::calls::{Answer, CopiesStatus};
    let (first, second) = (WordPair([1, 2]), WordPair([u64::MAX, 3]));
    let tree = CopyTree { node: 4, roots: [first, second], current: 1, sum: first };
    let former = vec![FormerRoot { node: 5, root: second, bytes: 10 }];
    let record = CopyRecord { revision: 6, bytes: 7, version: 8, synced_at_s: 9, trees: vec![tree], former };
    let one = r#""00000000000000010000000000000002""#;
    let two = r#""ffffffffffffffff0000000000000003""#;
    let tree = format!(r#"{{"node":4,"roots":[{one},{two}],"current":1,"sum":{one}}}"#);
    let former_json = format!(r#""former":[{{"node":5,"root":{two},"bytes":10}}]"#);
    let json =
        format!(r#"{{"revision":6,"bytes":7,"version":8,"synced_at_s":9,"trees":[{tree}],{former_json}}}"#);
    check(&record, &json);
    for text in ["", "0", &"A".repeat(32), &"é".repeat(16), &"0".repeat(33)] {
        assert!(serde_json::from_str::<WordPair>(&format!("{text:?}")).is_err(), "{text}");
    }
    let copies = Answer::Copies { record: Some(record.clone()), nodes: vec![1], nodes_here: vec![2] };
    check(&copies, &format!(r#"{{"copies":{{"record":{json},"nodes":[1],"nodes_here":[2]}}}}"#));
    let restoring = Answer::Restoring { address: 8192, record };
    check(&restoring, &format!(r#"{{"restoring":{{"address":8192,"record":{json}}}}}"#));
    let status = CopiesStatus {
        user: 1,
        id: 2,
        bytes: 3,
        version: 4,
        synced_at_s: 5,
        nodes: vec![6],
        left_on: vec![8],
        has_owner: false,
    };
    let json = r#"{"user":1,"id":2,"bytes":3,"version":4,"synced_at_s":5,"nodes":[6],"left_on":[8],"#;
    let json = [json, r#""has_owner":false}"#].concat();
    check(&Answer::ReportCopies(vec![status]), &format!(r#"{{"report_copies":[{json}]}}"#));
}

#[test]
fn golden_answers_to_calls() {
    use aquifer_arena::calls::Answer;
    let times = TimeSummary { count: 1, p50_us: 2, p99_us: 3, longest_us: 4 };
    let status = SegmentStatus {
        user: 6,
        id: 7,
        address: 8,
        bytes: 9,
        missing_bytes: 10,
        process: "p".into(),
        is_open: true,
        target: None,
    };
    let totals = SegmentTotals {
        handed_over: 1,
        received: 2,
        declined: 3,
        pages_on_touch: 4,
        pages_ahead: 5,
        transfers: times,
        waits: TimeSummary::default(),
    };
    let status_json = [
        r#"{"user":6,"id":7,"address":8,"bytes":9,"missing_bytes":10,"#,
        r#""process":"p","is_open":true,"target":null}"#,
    ]
    .concat();
    let totals_json = [
        r#"{"handed_over":1,"received":2,"declined":3,"pages_on_touch":4,"pages_ahead":5,"#,
        r#""transfers":{"count":1,"p50_us":2,"p99_us":3,"longest_us":4},"#,
        r#""waits":{"count":0,"p50_us":0,"p99_us":0,"longest_us":0}}"#,
    ]
    .concat();
    check(&Answer::Done, r#""done""#);
    check(&Answer::Nothing, r#""nothing""#);
    check(&Answer::Kept("why".into()), r#"{"kept":"why"}"#);
    check(&Answer::Failed("why".into()), r#"{"failed":"why"}"#);
    let opened = Answer::Opened { held: vec![7], awaited: vec![8], grace_ms: 9 };
    check(&opened, r#"{"opened":{"held":[7],"awaited":[8],"grace_ms":9}}"#);
    let segment =
        Answer::Segment { id: 7, address: 8, bytes: 9, is_partial: true, tenure: Tenure::default() };
    let tenure = r#""tenure":{"generation":0,"passes":0}"#;
    let json = format!(r#"{{"segment":{{"id":7,"address":8,"bytes":9,"is_partial":true,{tenure}}}}}"#);
    check(&segment, &json);
    check(&Answer::Asked { id: 7, process: "p".into() }, r#"{"asked":{"id":7,"process":"p"}}"#);
    check(&Answer::List(vec![status.clone()]), &format!(r#"{{"list":[{status_json}]}}"#));
    let report = Answer::Report { segments: vec![status], totals };
    check(&report, &format!(r#"{{"report":{{"segments":[{status_json}],"totals":{totals_json}}}}}"#));
}
