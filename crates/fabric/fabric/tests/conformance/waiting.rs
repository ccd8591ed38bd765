//! Tests of owners that wait for messages.

use std::time::Duration;

use super::harness::{Harness, WHO};

pub fn a_waiting_target_is_woken_by_a_message<H: Harness + Sync>() {
    const ROUNDS: u8 = 100;
    let harness = H::start();
    let target = harness.target();
    target.wait(Duration::ZERO);
    assert_eq!(target.receive(&mut Vec::new()), None);
    let mut client = harness.client(WHO);
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| {
            for round in 0..ROUNDS {
                loop {
                    target.wait(Duration::MAX);
                    let mut message = Vec::new();
                    if let Some(from) = target.receive(&mut message) {
                        assert_eq!(message, [round]);
                        assert!(target.reply(from.endpoint, &[round]));
                        break;
                    }
                }
            }
        });
        for round in 0..ROUNDS {
            assert_eq!(client.send(&[round]), Ok(1));
            let mut out = Vec::new();
            while !client.endpoint.receive(&mut out) {
                harness.pass_time();
            }
            assert_eq!(out, [round]);
        }
        owner.join().unwrap();
    });
}
