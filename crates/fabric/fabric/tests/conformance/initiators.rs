//! A program that holds endpoints for the suite on another machine, until it is killed. It listens
//! at `AQUIFER_INITIATORS`.

mod afar {
    pub mod calls;
    pub mod initiator;
    #[expect(dead_code, reason = "requests are encoded in the other program")]
    pub mod words;
}

use std::net::TcpListener;

use aquifer_fabric::ClusterKey;
use aquifer_fabric_verbs as verbs;

/// The key of the suite's harness.
const KEY: ClusterKey = ClusterKey([7; 32]);

fn main() {
    let listener = TcpListener::bind(std::env::var("AQUIFER_INITIATORS").expect("an address"))
        .expect("the address is free");
    afar::initiator::serve(&listener, |address, who| verbs::connect(address, &KEY, who));
}
