//! Golden tests of the JSON of records and messages.

use aquifer_cache::store::hash::HashSecret;
use aquifer_cache::store::index::IndexState;
use aquifer_cache::store::partition::Departure;
use aquifer_ownership::{Life, SegmentRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::keeping::{KeptRecord, item_number};
use crate::records::{CacheSettings, ServerRecord, SettingsRecord};
use crate::wire::{Answer, Ask, Handover, Hello, Offer, Purpose, Welcome};

fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, json: &str) {
    assert_eq!(serde_json::to_string(value).unwrap(), json);
    assert_eq!(serde_json::from_str::<T>(json).unwrap(), *value);
}

const FROM: Life = Life { host: 1, epoch: 10 };
const TO: Life = Life { host: 2, epoch: 20 };
const HANDOVER: Handover = Handover { partition: 5, generation: 7, attempt: 3, from: FROM, to: TO };
const HANDOVER_JSON: &str =
    r#"{"partition":5,"generation":7,"attempt":3,"from":{"host":1,"epoch":10},"to":{"host":2,"epoch":20}}"#;

#[test]
fn golden_records() {
    let hash_secret = HashSecret([11, 12]);
    let settings = CacheSettings { partitions: 128, has_cas: true, id: 7, hash_secret };
    check(
        &SettingsRecord::new(settings),
        r#"{"version":2,"cache":{"partitions":128,"has_cas":true,"id":7,"hash_secret":[11,12]}}"#,
    );
    let record = SegmentRecord { owner: FROM, generation: 6, intent: Some(TO) };
    let json = r#"{"owner":{"host":1,"epoch":10},"generation":6,"intent":{"host":2,"epoch":20}}"#;
    check(&record, json);
    let kept = KeptRecord { id: 0x0102_0304_0506_0708, partition: SegmentRecord::new(FROM, 6) };
    let json = r#"{"id":72623859790382856,"owner":{"host":1,"epoch":10},"generation":6,"intent":null}"#;
    check(&kept, json);
    assert_eq!(item_number(0x0102_0304_0506_0708, 5), 0x0102_0304_0506_0005);
    let server = ServerRecord {
        server: 1,
        epoch: 10,
        address: "10.0.0.1:1".parse().unwrap(),
        memory_address: "10.0.0.1:2".parse().unwrap(),
        machine: "m".to_owned(),
        memory_socket: "/s".to_owned(),
        clients: vec!["tcp:10.0.0.1:11211".to_owned()],
        memory_bytes: 64,
        drains: false,
    };
    let json = concat!(
        r#"{"server":1,"epoch":10,"address":"10.0.0.1:1","memory_address":"10.0.0.1:2","machine":"m","#,
        r#""memory_socket":"/s","clients":["tcp:10.0.0.1:11211"],"memory_bytes":64,"drains":false}"#
    );
    check(&server, json);
}

#[test]
fn golden_questions() {
    let hello = Hello { version: 4, cache: "main".to_owned(), purpose: Purpose::Questions, encrypt: true };
    check(&hello, r#"{"version":4,"cache":"main","purpose":"questions","encrypt":true}"#);
    check(&Welcome::Accepted { encrypt: true }, r#"{"accepted":{"encrypt":true}}"#);
    check(&Welcome::Refused("no".to_owned()), r#"{"refused":"no"}"#);
    let offer = Offer {
        address: "10.0.0.1:2".parse().unwrap(),
        machine: "m".to_owned(),
        socket: "/s".to_owned(),
        region: (4096, 1),
        local_region: (8192, 2),
        runs: 66,
        buckets: 8192,
        bytes: 100,
        requests_per_s: 1.5,
    };
    let json = concat!(
        r#""offer":{"address":"10.0.0.1:2","machine":"m","socket":"/s","region":[4096,1],"#,
        r#""local_region":[8192,2],"runs":66,"buckets":8192,"bytes":100,"requests_per_s":1.5}}}"#
    );
    let prepare = Ask::Prepare { handover: HANDOVER, offer };
    check(&prepare, &format!(r#"{{"prepare":{{"handover":{HANDOVER_JSON},{json}"#));
    for (ask, name) in [
        (Ask::Extent(HANDOVER), "extent"),
        (Ask::Rest(HANDOVER), "rest"),
        (Ask::Give(HANDOVER), "give"),
        (Ask::Received(HANDOVER), "received"),
        (Ask::Query(HANDOVER), "query"),
    ] {
        check(&ask, &format!(r#"{{"{name}":{HANDOVER_JSON}}}"#));
    }
    let give_up = Ask::GiveUp(HANDOVER, "no".to_owned());
    check(&give_up, &format!(r#"{{"give-up":[{HANDOVER_JSON},"no"]}}"#));
    check(&Ask::Status, r#""status""#);
    check(&Ask::Balance, r#""balance""#);
    check(&Ask::Move { partition: 5, to: 2 }, r#"{"move":{"partition":5,"to":2}}"#);
    check(&Ask::Drain { drains: true }, r#"{"drain":{"drains":true}}"#);
}

#[test]
fn golden_answers() {
    let departure = Departure {
        cas: 1,
        items: 2,
        sequence_end: 3,
        second: 4,
        flush_in_s: Some(5),
        runs_end: 6,
        index: IndexState { buckets: 64, overflow_buckets: 8, overflow_free: 9 },
    };
    let json = concat!(
        r#"{"rests":{"cas":1,"items":2,"sequence_end":3,"second":4,"flush_in_s":5,"runs_end":6,"#,
        r#""index":{"buckets":64,"overflow_buckets":8,"overflow_free":9}}}"#
    );
    check(&Answer::Rests(departure), json);
    for (answer, name) in [
        (Answer::Done, "done"),
        (Answer::NotYet, "not-yet"),
        (Answer::Given, "given"),
        (Answer::Received, "received"),
        (Answer::NotReceived, "not-received"),
    ] {
        check(&answer, &format!("\"{name}\""));
    }
    check(&Answer::Declined("no".to_owned()), r#"{"declined":"no"}"#);
    check(&Answer::Extent(9), r#"{"extent":9}"#);
    check(&Answer::Moves(vec![(5, 2)]), r#"{"moves":[[5,2]]}"#);
}
