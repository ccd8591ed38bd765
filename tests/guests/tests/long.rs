//! What takes longer than `make test` may; `make test-guests` runs it.

use std::time::Duration;

use aquifer_tests_guests::{Guest, GuestError, kernel};

#[test]
fn time_is_up_at_the_limit() {
    let Some(kernel) = kernel() else { return };
    let guest = Guest { time_limit: Duration::from_secs(60), ..Guest::default() };
    let error = guest.run(&kernel, &["sh", "-c", "echo here; exec sleep infinity"]).unwrap_err();
    assert!(matches!(&error, GuestError::TimedOut(outcome) if outcome.stdout == "here\n"), "{error}");
}

#[test]
fn two_guests_share_a_network() {
    let Some(kernel) = kernel() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = Guest::pair(folder.path());
    let server = one.start(&kernel, &["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "100"]).unwrap();
    let script = "until ibv_rc_pingpong -d rxe0 -g 1 -n 100 10.9.0.1; do :; done";
    let client = two.run(&kernel, &["timeout", "120", "sh", "-c", script]).unwrap().success();
    let server = server.wait().unwrap().success();
    assert!(client.stdout.contains("100 iters") && server.stdout.contains("100 iters"), "{client}{server}");
}
