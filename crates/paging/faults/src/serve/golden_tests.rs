//! Golden JSON of `docs/formats/ipc.md`: the keeper's records of runs and programs.
//! A changed golden file needs a changed document. A new field needs a default, because an agent of
//! another build reads the record.

use aquifer_ipc::{ProgramHello, RunToken};
use aquifer_tests_support::golden;

use super::records::{HelloRecord, ProgramRecord, RunRecord, decode};

#[test]
fn golden_records_of_runs_and_programs() {
    let mut golden = golden!("records");
    let run = RunRecord {
        token: RunToken([0x0f; 16]).to_hex(),
        name: "ls".into(),
        limit_bytes: 1,
        limit_max_bytes: Some(4),
        tenant: 2,
        copies: 3,
        outlives_owner: true,
        is_strict: true,
        wait_for_room_ms: None,
        owner_pid: Some(12),
    };
    let put = run.put(7);
    assert_eq!(decode::<RunRecord>(&put).expect("it was just written"), run);
    golden.text("run", &put.record);
    let hello = HelloRecord { is_child: true, bounce_buffer: 1, staging: 2 };
    let program = |origin, hello| ProgramRecord {
        run: 1,
        origin,
        private: [2, 3, 4],
        nonce: [7; 16],
        only: [5, 6],
        must_check_inheritance: true,
        hello,
    };
    let programs = [
        ("program", program(None, Some(HelloRecord { is_child: false, ..hello }))),
        ("forked child", program(Some((7, 8)), Some(hello))),
        ("program before its hello", program(None, None)),
    ];
    for (name, program) in programs {
        let put = program.put(9, 10, 11);
        assert_eq!(decode::<ProgramRecord>(&put).expect("it was just written"), program, "{name}");
        golden.text(name, &put.record);
    }
    // The value of each field of a hello after it is stored and read again.
    let said = ProgramHello {
        token: RunToken([3; 16]),
        is_child: true,
        child_number: 0,
        bounce_buffer: 1,
        staging: 2,
        canary: 4,
        private_start: 2,
        private_end: 3,
        paged_start: 5,
        paged_end: 6,
    };
    assert_eq!(program(None, Some(HelloRecord::from(&said))).hello(said.token), Some(said));
    golden.check();
}
