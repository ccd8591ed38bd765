//! Endpoints that connect with tickets, and attacks by programs that hold one.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::handshake::hello::{self, Hello, Reply};
use aquifer_fabric::handshake::secure;
use aquifer_fabric::handshake::{Credential, Refusal};
use aquifer_fabric::{Admission, Ticket, TicketSecret, UnixClock};
use aquifer_secure_channel::SecureError;

use super::*;

const SERVICE: u8 = 3;
const NOW_S: u64 = 1_800_000_000;
const TICKET: Ticket =
    Ticket { tenant: Tenant(70), host: Host(8), epoch: 5, expiry_s: NOW_S + 60, service: SERVICE };

fn target_of(admission: Admission, now_s: &Arc<AtomicU64>) -> (TcpTarget, Arc<Memory>, Region) {
    let now_s = Arc::clone(now_s);
    let clock = UnixClock::new(move || now_s.load(Ordering::SeqCst));
    node(TcpOptions { admission, clock, ..TcpOptions::default() })
}

fn clock() -> Arc<AtomicU64> {
    Arc::new(AtomicU64::new(NOW_S))
}

fn connect(target: &TcpTarget, ticket: &Ticket, secret: &TicketSecret) -> Result<TcpClient, EndpointError> {
    let options = ConnectOptions { operation_time: TEST_TIMEOUT, ..ConnectOptions::default() };
    let mut endpoint = tcp::connect_with_ticket(target.address(), ticket, secret, options)?;
    let memory = Arc::new(Memory::create("local", REGION_BYTES).unwrap());
    let local = endpoint.register_local(Arc::clone(&memory)).unwrap();
    Ok(TcpClient { endpoint, memory, local })
}

fn refusal(outcome: Result<TcpClient, EndpointError>) -> Refusal {
    match outcome {
        Err(EndpointError::Refused { refusal, .. }) => refusal,
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn an_endpoint_has_the_identity_of_its_ticket() {
    let (target, _memory, _) = target_of(Admission::Tickets(SERVICE), &clock());
    let memory = Arc::new(Memory::create("own", 4096).unwrap());
    let own = target.register(memory, Access::ALL, Scope::Tenant(TICKET.tenant)).unwrap();
    let mut client = connect(&target, &TICKET, &TICKET.secret(&KEY)).unwrap();
    let remote = RemoteAddr { addr: own.base, key: own.key };
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Ok(0));
    let local = client.slice(0, 4);
    assert_eq!(client.one(Verb::Send { local }), Ok(4));
    assert_eq!(target.receive(&mut Vec::new()).unwrap().who, TICKET.identity());
    let other = Ticket { tenant: Tenant(71), ..TICKET };
    let mut other = connect(&target, &other, &other.secret(&KEY)).unwrap();
    assert_eq!(other.one(Verb::FetchAdd { remote, add: 1 }), Err(WorkError::RemoteAccess));
    // A fence of the host ends its tickets.
    target.fence(TICKET.host, TICKET.epoch);
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Err(WorkError::Fenced));
    assert_eq!(refusal(connect(&target, &TICKET, &TICKET.secret(&KEY))).code, RefusalCode::Fenced);
}

#[test]
fn a_target_admits_as_its_options_say() {
    for (admission, has_members, has_tickets) in [
        (Admission::Members, true, false),
        (Admission::Tickets(SERVICE), false, true),
        (Admission::MembersAndTickets(SERVICE), true, true),
        (Admission::MembersAndTickets(SERVICE + 1), true, false),
    ] {
        let (target, _memory, _) = target_of(admission, &clock());
        let member = try_client(target.address(), WHO);
        let holder = connect(&target, &TICKET, &TICKET.secret(&KEY));
        assert_eq!((member.is_ok(), holder.is_ok()), (has_members, has_tickets), "{admission:?}");
        for outcome in [member, holder].into_iter().filter(Result::is_err) {
            assert_eq!(refusal(outcome).code, RefusalCode::WrongKey);
        }
    }
}

#[test]
fn forged_tickets_are_refused_like_a_wrong_key() {
    let (target, _memory, _) = target_of(Admission::MembersAndTickets(SERVICE), &clock());
    let secret = TICKET.secret(&KEY);
    let forged = [
        (Ticket { tenant: Tenant(0), ..TICKET }, secret.clone()),
        (Ticket { host: Host(9), ..TICKET }, secret.clone()),
        (Ticket { epoch: u64::MAX, ..TICKET }, secret.clone()),
        (Ticket { expiry_s: u64::MAX, ..TICKET }, secret.clone()),
        (Ticket { service: SERVICE + 1, ..TICKET }, secret.clone()),
        (TICKET, TICKET.secret(&ClusterKey([9; 32]))),
        (TICKET, TicketSecret([0; 32])),
    ];
    let wrong_key = RefusalCode::WrongKey;
    for (ticket, secret) in &forged {
        assert_eq!(refusal(connect(&target, ticket, secret)).code, wrong_key, "{ticket:?}");
    }
    // A genuine ticket for another service.
    let other = Ticket { service: SERVICE + 1, ..TICKET };
    assert_eq!(refusal(connect(&target, &other, &other.secret(&KEY))).code, wrong_key);
    // The ticket's secret as the cluster's key, to claim membership.
    let claimed = tcp::connect(target.address(), &ClusterKey(secret.0), WHO, ConnectOptions::default());
    match claimed {
        Err(EndpointError::Refused { refusal, .. }) => assert_eq!(refusal.code, wrong_key),
        other => panic!("{other:?}"),
    }
    assert_eq!(target.endpoints(), 0);
    assert!(connect(&target, &TICKET, &secret).is_ok());
}

/// A holder that speaks the protocol by itself presents another identity in its hello.
#[test]
fn the_hello_must_present_the_identity_of_the_ticket() {
    let (target, _memory, _) = target_of(Admission::MembersAndTickets(SERVICE), &clock());
    let ask = |who: Identity| {
        let stream = std::net::TcpStream::connect(target.address()).unwrap();
        let credential = Credential::Ticket(TICKET, TICKET.secret(&KEY));
        let mut secured = secure::initiate_by(stream, &credential)?;
        secured.send(&hello::encode_hello(&Hello { who, encrypt: true, resume: None }))?;
        Ok::<_, SecureError>(hello::parse_reply(&secured.receive()?).unwrap())
    };
    let own = TICKET.identity();
    for who in [WHO, Identity { tenant: Tenant(0), ..own }, Identity { epoch: u64::MAX, ..own }] {
        match ask(who).unwrap() {
            Reply::Refusal(refusal) => assert_eq!(refusal.code, RefusalCode::WrongKey, "{who:?}"),
            Reply::Welcome(_) => panic!("{who:?} was admitted"),
        }
    }
    assert!(matches!(ask(own).unwrap(), Reply::Welcome(_)));
}

#[test]
fn an_expired_ticket_is_named_and_ends_no_session() {
    let now_s = clock();
    let (target, _memory, region) = target_of(Admission::Tickets(SERVICE), &now_s);
    let secret = TICKET.secret(&KEY);
    now_s.store(TICKET.expiry_s - 1, Ordering::SeqCst);
    let mut client = connect(&target, &TICKET, &secret).unwrap();
    now_s.store(TICKET.expiry_s, Ordering::SeqCst);
    let refused = refusal(connect(&target, &TICKET, &secret));
    assert_eq!(
        (refused.code, &refused.reason[..]),
        (RefusalCode::TicketExpired, "the ticket expired 0 s ago")
    );
    now_s.store(TICKET.expiry_s + 100, Ordering::SeqCst);
    assert_eq!(refusal(connect(&target, &TICKET, &secret)).reason, "the ticket expired 100 s ago");
    let remote = RemoteAddr { addr: region.base, key: region.key };
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Ok(0), "the session outlives its ticket");
    let longer = Ticket { expiry_s: TICKET.expiry_s + 200, ..TICKET };
    assert!(connect(&target, &longer, &longer.secret(&KEY)).is_ok());
}
