//! Real processes, killed or stopped at every step of what a host does, over real fabrics: afterwards all that they held is free, all that
//! others hold is as it was, and what a stopped one does late changes nothing.

mod scene;
mod victim;

use aquifer_fabric::Reach;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};

use scene::{Heir, Scene, at_every_step};
use victim::{End, KEY};

/// The name of the test that is a victim.
const VICTIM_TEST: &str = "killed::victim";

fn over_shm() -> Scene {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("node");
    let target = ShmTarget::listen(&path, shm::Options::default()).expect("a target");
    Scene::on(Some(folder), Box::new(target), Reach::Shm(path))
}

fn over_tcp() -> Scene {
    let any = "127.0.0.1:0".parse().expect("an address");
    let target = TcpTarget::listen(any, &KEY, tcp::Options::default()).expect("a target");
    let reach = Reach::Tcp(target.address());
    Scene::on(None, Box::new(target), reach)
}

#[test]
fn a_host_may_be_killed_at_any_step_over_shm() {
    at_every_step(&over_shm(), End::Kill, Heir::Another, 1);
}

#[test]
fn a_killed_host_that_comes_again_gives_back_what_it_had() {
    at_every_step(&over_shm(), End::Kill, Heir::Itself, 1);
}

#[test]
fn a_host_may_stand_still_at_any_step_over_shm() {
    at_every_step(&over_shm(), End::Stop, Heir::Another, 1);
}

#[test]
fn who_stands_still_in_the_middle_of_an_access_holds_nobody_up() {
    let (shm, tcp) = (over_shm(), over_tcp());
    // It copies by itself, and nearly all of the time.
    assert!((0..50).any(|_| shm.stop_in_the_middle()));
    // There the node does.
    assert!(!(0..4).any(|_| tcp.stop_in_the_middle()));
}

/// Not a test by itself: what the others start.
#[test]
fn victim() {
    victim::be_one();
}

mod long {
    use super::*;

    #[test]
    fn a_host_may_be_killed_at_any_step_over_tcp() {
        at_every_step(&over_tcp(), End::Kill, Heir::Another, 1);
    }

    #[test]
    fn a_host_may_stand_still_at_any_step_over_tcp() {
        at_every_step(&over_tcp(), End::Stop, Heir::Another, 1);
    }
}
