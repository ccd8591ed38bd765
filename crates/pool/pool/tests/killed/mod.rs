//! Real processes that are killed or stopped at every step, over real fabrics.
//!
//! Afterwards all memory that they owned is free, the memory of others is unchanged, and later
//! operations of a stopped process change nothing.

mod scene;
mod victim;

use aquifer_fabric::FabricAddress;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};

use scene::{KilledScene, Recoverer, at_every_step};
use victim::{KEY, VictimEnd};

/// The name of the test that runs as the victim.
const VICTIM_TEST: &str = "killed::victim";

fn over_shm() -> KilledScene {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("node");
    let target = ShmTarget::listen(&path, shm::ShmOptions::default()).expect("a target");
    KilledScene::on(Some(folder), Box::new(target), FabricAddress::Shm(path))
}

fn over_tcp() -> KilledScene {
    let any = "127.0.0.1:0".parse().expect("an address");
    let target = TcpTarget::listen(any, &KEY, tcp::TcpOptions::default()).expect("a target");
    let reach = FabricAddress::Tcp(target.address());
    KilledScene::on(None, Box::new(target), reach)
}

#[test]
fn a_host_may_be_killed_at_any_step_over_shm() {
    at_every_step(&over_shm(), VictimEnd::Kill, Recoverer::AnotherHost, 1);
}

#[test]
fn a_killed_host_that_restarts_frees_what_it_owned() {
    at_every_step(&over_shm(), VictimEnd::Kill, Recoverer::SameHost, 1);
}

#[test]
fn a_host_may_be_stopped_at_any_step_over_shm() {
    at_every_step(&over_shm(), VictimEnd::Stop, Recoverer::AnotherHost, 1);
}

#[test]
fn a_host_that_is_stopped_in_the_middle_of_an_access_does_not_block_others() {
    let (shm, tcp) = (over_shm(), over_tcp());
    // Over shm the host itself copies, so it is usually stopped in the middle of an access.
    assert!((0..50).any(|_| shm.stop_in_the_middle()));
    // Over tcp the node copies, so the host is never stopped in the middle of an access.
    assert!(!(0..4).any(|_| tcp.stop_in_the_middle()));
}

/// The victim's process, which the other tests start.
#[test]
fn victim() {
    victim::run_if_started();
}

mod long {
    use super::*;

    #[test]
    fn a_host_may_be_killed_at_any_step_over_tcp() {
        at_every_step(&over_tcp(), VictimEnd::Kill, Recoverer::AnotherHost, 1);
    }

    #[test]
    fn a_host_may_be_stopped_at_any_step_over_tcp() {
        at_every_step(&over_tcp(), VictimEnd::Stop, Recoverer::AnotherHost, 1);
    }
}
