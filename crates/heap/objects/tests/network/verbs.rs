//! Heaps whose memory is served by an RDMA device: that with the IP address in
//! `AQUIFER_VERBS_ADDRESS`.

mod suite;

use std::net::SocketAddr;
use std::sync::Arc;

use aquifer_fabric::handshake::Credential;
use aquifer_fabric::{Admission, Endpoint};
use aquifer_fabric_verbs::{VerbsEndpoint, VerbsOptions, VerbsTarget};

use suite::{Device, KEY, SERVICE, tests};

fn device() -> Option<Device> {
    let address =
        std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is that of an RDMA device");
    let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
    let options = VerbsOptions { admission: Admission::Tickets(SERVICE), ..VerbsOptions::default() };
    let target = VerbsTarget::listen(address, &KEY, options).expect("a target");
    let address = target.address();
    let connect = |address, ticket: &aquifer_fabric::Ticket| {
        let credential = Credential::Ticket(*ticket, ticket.secret(&KEY));
        let endpoint = VerbsEndpoint::connect_by(address, &credential, ticket.identity())?;
        Ok(Box::new(endpoint) as Box<dyn Endpoint>)
    };
    Some(Device { target: Arc::new(target), connect, address })
}

tests! { device() }
