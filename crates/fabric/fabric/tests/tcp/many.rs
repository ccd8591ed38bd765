//! A target with thousands of endpoints.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use aquifer_fabric::handshake::RefusalCode;
use aquifer_fabric::handshake::hello::{self, Hello, Reply};
use aquifer_fabric::handshake::secure;
use aquifer_fabric::limits::{ANNOUNCED_MAX, ENDPOINTS_LIMIT};
use aquifer_fabric::tcp::TcpOptions;
use aquifer_fabric::tcp::wire::{self, ANSWER_BYTES, RequestHead, padded};
use aquifer_fabric::{Access, EndpointError, Identity, Region, RemoteAddr, Scope, Target, Tenant, Verb};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use zerocopy::IntoBytes;

use super::{WHO, client, node, try_client};

/// Bytes of memory that an idle connection may take.
const IDLE_BYTES_MAX: usize = 32 << 10;
/// Bytes that each connection reads before it is idle.
const READ_BYTES: u32 = 100_000;

/// Permits this process `count` descriptors. Returns false if the system refuses.
fn raise_descriptors(count: u64) -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raise = |maximum| setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum });
    current.is_none_or(|current| current >= count)
        || maximum.is_none_or(|most| most >= count) && raise(maximum).is_ok()
        || raise(Some(count)).is_ok()
}

/// The resident memory of this process, in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

/// A connection without the buffers of an endpoint.
struct PlainConnection(TcpStream);

impl PlainConnection {
    fn open(address: std::net::SocketAddr, who: Identity) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        let mut secured = secure::initiate(stream, &super::KEY).unwrap();
        secured.send(&hello::encode_hello(&Hello { who, encrypt: false, resume: None })).unwrap();
        let reply = hello::parse_reply(&secured.receive().unwrap()).unwrap();
        assert!(matches!(reply, Reply::Welcome(_)), "{reply:?}");
        Self(secured.into_parts().0)
    }

    /// Sends a request and receives its answer.
    fn call(&mut self, request: RequestHead, data: &[u8], answer_bytes: usize) -> Vec<u8> {
        self.0.write_all(&[request.as_bytes(), data].concat()).unwrap();
        let mut answer = vec![0; ANSWER_BYTES + answer_bytes];
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(answer[1], 0, "the request is done");
        answer
    }

    fn read(&mut self, region: &Region) {
        let mut request = RequestHead::new(wire::READ, READ_BYTES);
        request.addr = region.base.into();
        request.key = region.key.0.into();
        self.call(request, &[], padded(READ_BYTES));
    }
}

fn many(count: usize) {
    if !raise_descriptors(2 * count as u64 + 1000) {
        return aquifer_tests_support::skip("the system does not permit as many descriptors");
    }
    let (target, _memory, region) =
        node(TcpOptions { endpoints_max: count, threads: 2, ..TcpOptions::default() });
    for _ in 0..4 {
        PlainConnection::open(target.address(), WHO).read(&region);
    }
    while target.endpoints() > 0 {
        std::thread::yield_now();
    }
    let before = resident_bytes();
    let mut connections: Vec<PlainConnection> = Vec::with_capacity(count);
    for number in 0..count {
        let tenant = Tenant(u32::try_from(number % 100).unwrap());
        let mut connection = PlainConnection::open(target.address(), Identity { tenant, ..WHO });
        connection.read(&region);
        connections.push(connection);
    }
    assert_eq!(target.endpoints(), count);
    let each = resident_bytes().saturating_sub(before) / count;
    assert!(each <= IDLE_BYTES_MAX, "{count} idle connections take {each} bytes each");
    match try_client(target.address(), WHO) {
        Err(EndpointError::Refused { refusal, .. }) => assert_eq!(refusal.code, RefusalCode::NoRoom),
        other => panic!("one endpoint too many: {:?}", other.map(|_| ())),
    }

    let mut senders = Vec::new();
    for (number, connection) in connections.iter_mut().enumerate() {
        let text = (number as u64).to_le_bytes();
        connection.call(RequestHead::new(wire::SEND, 8), &text, 0);
    }
    for number in 0..count {
        let mut message = Vec::new();
        senders.push(target.receive(&mut message).unwrap());
        assert_eq!(message, (number as u64).to_le_bytes(), "in the order of arrival");
    }
    for (number, sender) in senders.iter().enumerate().rev() {
        assert!(target.reply(sender.endpoint, &(number as u64).to_le_bytes()));
    }
    for (number, connection) in connections.iter_mut().enumerate() {
        let mut message = [0; ANSWER_BYTES + 8];
        connection.0.read_exact(&mut message).unwrap();
        assert_eq!(message[ANSWER_BYTES..], (number as u64).to_le_bytes(), "the reply to this one");
        connection.read(&region);
    }
    target.invalidate(region.key).unwrap();
    drop(connections);
}

#[test]
fn hundreds_of_idle_endpoints_take_little_memory() {
    many(300);
}

mod long {
    #[test]
    fn thousands_of_idle_endpoints_take_little_memory() {
        super::many(4096);
    }
}

#[test]
fn a_tenant_cannot_take_all_endpoints() {
    let options = TcpOptions { endpoints_max: 5, endpoints_per_tenant_max: 2, ..TcpOptions::default() };
    let (target, _memory, _region) = node(options);
    let first = client(target.address());
    let _second = client(target.address());
    let refusal = match try_client(target.address(), WHO) {
        Err(EndpointError::Refused { refusal, .. }) => refusal,
        other => panic!("{:?}", other.map(|_| ())),
    };
    assert_eq!(refusal.code, RefusalCode::NoRoom, "the target's memory is intact");
    assert_eq!(refusal.reason, "tenant 9 has 2 endpoints already, which is its limit");
    let _other = try_client(target.address(), Identity { tenant: Tenant(10), ..WHO }).unwrap();
    drop(first);
    while target.endpoints() > 2 {
        std::thread::yield_now();
    }
    drop(client(target.address()));
    let faulty = TcpOptions { endpoints_max: ENDPOINTS_LIMIT + 1, ..TcpOptions::default() };
    let refused = aquifer_fabric::tcp::TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &super::KEY, faulty);
    assert!(refused.unwrap_err().to_string().contains("between 1 and 8192"));
}

#[test]
fn thousands_of_regions_are_used_and_few_are_announced() {
    const REGIONS: usize = 3000;
    let (target, memory, region) = node(TcpOptions { regions_max: REGIONS, ..TcpOptions::default() });
    let register = || target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    let regions: Vec<Region> = [region].into_iter().chain((1..REGIONS).map(|_| register())).collect();
    let mut client = client(target.address());
    assert_eq!(client.endpoint.regions(), &regions[..ANNOUNCED_MAX]);
    for (number, region) in (0..).zip(&regions) {
        let remote = RemoteAddr { addr: region.base, key: region.key };
        assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Ok(number));
    }
}
