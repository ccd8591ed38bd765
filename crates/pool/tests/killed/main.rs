//! Real processes, killed or stopped at every step of what a host does, over real fabrics: afterwards all that they held is free, all that
//! others hold is as it was, and what a stopped one does late changes nothing.

mod scene;
mod victim;

use scene::{Heir, Scene};
use victim::{End, Moment};

/// The script has at least so many steps.
const STEPS_MIN: usize = 100;

fn at_every_step(scene: &Scene, end: End, heir: Heir) {
    for moment in [Moment::Before, Moment::After] {
        let mut step = 0;
        while scene.play(step, moment, end, heir) {
            step += 1;
        }
        assert!(step >= STEPS_MIN, "it was over after {step} steps");
    }
}

#[test]
fn a_host_may_be_killed_at_any_step_over_shm() {
    at_every_step(&Scene::over_shm(), End::Kill, Heir::Another);
}

#[test]
fn a_host_may_be_killed_at_any_step_over_tcp() {
    at_every_step(&Scene::over_tcp(), End::Kill, Heir::Another);
}

#[test]
fn a_killed_host_that_comes_again_gives_back_what_it_had() {
    at_every_step(&Scene::over_shm(), End::Kill, Heir::Itself);
}

#[test]
fn a_host_may_stand_still_at_any_step_over_shm() {
    at_every_step(&Scene::over_shm(), End::Stop, Heir::Another);
}

#[test]
fn a_host_may_stand_still_at_any_step_over_tcp() {
    at_every_step(&Scene::over_tcp(), End::Stop, Heir::Another);
}

#[test]
fn who_stands_still_in_the_middle_of_an_access_holds_nobody_up() {
    let (shm, tcp) = (Scene::over_shm(), Scene::over_tcp());
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
