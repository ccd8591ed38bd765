//! The same over an RDMA device: that with the IP address in `AQUIFER_VERBS_ADDRESS`. `AQUIFER_KILLED_STRIDE` says at which of the steps, for what runs the device
//! may be an emulator.

mod scene;
mod victim;

use std::net::SocketAddr;

use aquifer_fabric::Reach;
use aquifer_fabric_verbs::{Options, VerbsTarget};

use scene::{Heir, Scene, at_every_step};
use victim::{End, KEY};

/// The name of the test that is a victim.
const VICTIM_TEST: &str = "victim";

fn over_verbs() -> Scene {
    aquifer_fabric_verbs::install();
    let address = std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is an RDMA device's");
    let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
    let target = VerbsTarget::listen(address, &KEY, Options::default()).expect("a target");
    let reach = Reach::Verbs(target.address());
    Scene::on(None, Box::new(target), reach)
}

fn stride() -> usize {
    std::env::var("AQUIFER_KILLED_STRIDE").map_or(1, |stride| stride.parse().expect("a number of steps"))
}

#[test]
fn a_host_may_be_killed_at_any_step() {
    at_every_step(&over_verbs(), End::Kill, Heir::Another, stride());
}

#[test]
fn a_killed_host_that_comes_again_gives_back_what_it_had() {
    at_every_step(&over_verbs(), End::Kill, Heir::Itself, stride());
}

#[test]
fn a_host_may_stand_still_at_any_step() {
    at_every_step(&over_verbs(), End::Stop, Heir::Another, stride());
}

#[test]
fn who_stands_still_in_the_middle_of_an_access_holds_nobody_up() {
    // Its device goes on.
    assert!(!over_verbs().stop_in_the_middle());
}

/// Not a test by itself: what the others start.
#[test]
fn victim() {
    aquifer_fabric_verbs::install();
    victim::be_one();
}
