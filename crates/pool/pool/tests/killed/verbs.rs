//! Processes that are killed or stopped, over the RDMA device with the IP address in
//! `AQUIFER_VERBS_ADDRESS`.
//!
//! `AQUIFER_KILLED_STRIDE` is the distance between the steps that are tested, because an emulated
//! device is slow.

mod scene;
mod victim;

use std::net::SocketAddr;

use aquifer_fabric::FabricAddress;
use aquifer_fabric_verbs::{VerbsOptions, VerbsTarget};

use scene::{KilledScene, Recoverer, at_every_step};
use victim::{KEY, VictimEnd};

/// The name of the test that runs as the victim.
const VICTIM_TEST: &str = "victim";

fn over_verbs() -> KilledScene {
    aquifer_fabric_verbs::install();
    let address = std::env::var("AQUIFER_VERBS_ADDRESS")
        .expect("AQUIFER_VERBS_ADDRESS is the address of an RDMA device");
    let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
    let target = VerbsTarget::listen(address, &KEY, VerbsOptions::default()).expect("a target");
    let reach = FabricAddress::Verbs(target.address());
    KilledScene::on(None, Box::new(target), reach)
}

fn stride() -> usize {
    std::env::var("AQUIFER_KILLED_STRIDE").map_or(1, |stride| stride.parse().expect("a number of steps"))
}

#[test]
fn a_host_may_be_killed_at_any_step() {
    at_every_step(&over_verbs(), VictimEnd::Kill, Recoverer::AnotherHost, stride());
}

#[test]
fn a_killed_host_that_restarts_frees_what_it_owned() {
    at_every_step(&over_verbs(), VictimEnd::Kill, Recoverer::SameHost, stride());
}

#[test]
fn a_host_may_be_stopped_at_any_step() {
    at_every_step(&over_verbs(), VictimEnd::Stop, Recoverer::AnotherHost, stride());
}

#[test]
fn a_host_that_is_stopped_in_the_middle_of_an_access_does_not_block_others() {
    // The device continues.
    assert!(!over_verbs().stop_in_the_middle());
}

/// The victim's process, which the other tests start.
#[test]
fn victim() {
    aquifer_fabric_verbs::install();
    victim::run_if_started();
}
