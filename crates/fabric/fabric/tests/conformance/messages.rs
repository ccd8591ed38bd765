use aquifer_fabric::{EndpointNumber, Host, Identity, Sender, Target, WorkError};

use super::harness::{HOST, Harness, LIMITS, WHO};

fn receive(target: &dyn Target) -> Option<(Identity, Vec<u8>)> {
    let (from, message) = receive_from(target)?;
    Some((from.who, message))
}

fn receive_from(target: &dyn Target) -> Option<(Sender, Vec<u8>)> {
    let mut out = b"before".to_vec();
    let from = target.receive(&mut out)?;
    assert_eq!(&out[..6], b"before", "messages are appended");
    Some((from, out[6..].to_vec()))
}

pub fn messages_go_both_ways_in_order<H: Harness>() {
    let harness = H::start();
    let other = Identity { host: Host(8), ..WHO };
    let (mut one, mut two) = (harness.client(WHO), harness.client(other));
    assert_eq!(one.send(b"first"), Ok(5));
    assert_eq!(two.send(b"second"), Ok(6));
    assert_eq!(one.send(b"third"), Ok(5));
    let target = harness.target();
    assert_eq!(receive(target), Some((WHO, b"first".to_vec())));
    assert_eq!(receive(target), Some((other, b"second".to_vec())));
    assert_eq!(receive(target), Some((WHO, b"third".to_vec())));
    assert_eq!(receive(target), None);

    assert_eq!(target.send(HOST, b"to one"), 1);
    assert_eq!(target.send(HOST, b"again"), 1);
    assert_eq!(target.send(Host(9), b"lost"), 0);
    let mut out = Vec::new();
    for _ in 0..2 {
        while !one.endpoint.receive(&mut out) {
            harness.pass_time();
        }
    }
    assert_eq!(out, b"to oneagain");
    assert!(!one.endpoint.receive(&mut out) && !two.endpoint.receive(&mut out));
    let mut same_host = harness.client(WHO);
    assert_eq!(target.send(HOST, b"both"), 2);
    for client in [&mut one, &mut same_host] {
        while !client.endpoint.receive(&mut out) {
            harness.pass_time();
        }
    }
}

pub fn the_receiver_is_bounded<H: Harness>() {
    let harness = H::start();
    let (mut client, target) = (harness.client(WHO), harness.target());
    for round in 0..3 {
        for _ in 0..LIMITS.receive_depth {
            assert_eq!(client.send(&[round; 512]), Ok(512));
        }
        assert_eq!(client.send(b"x"), Err(WorkError::ReceiverNotReady));
        assert_eq!(receive(target), Some((WHO, vec![round; 512])));
        assert_eq!(client.send(b"x"), Ok(1), "the endpoint stays usable");
        while receive(target).is_some() {}

        for _ in 0..LIMITS.receive_depth {
            assert_eq!(target.send(HOST, b"news"), 1);
        }
        assert_eq!(target.send(HOST, b"news"), 0);
        for _ in 0..LIMITS.receive_depth {
            while !client.endpoint.receive(&mut Vec::new()) {
                harness.pass_time();
            }
        }
        assert!(!client.endpoint.receive(&mut Vec::new()));
    }
}

pub fn long_messages_are_refused<H: Harness>() {
    let harness = H::start();
    let (mut client, target) = (harness.client(WHO), harness.target());
    assert_eq!(client.send(&[1; 513]), Err(WorkError::TooLong));
    assert_eq!(client.send(&[1; 512]), Ok(512));
    assert_eq!(target.send(HOST, &[2; 513]), 0);
    assert_eq!(target.send(HOST, &[2; 512]), 1);
    assert_eq!(receive(target), Some((WHO, vec![1; 512])));
}

pub fn messages_outlive_their_sender<H: Harness>() {
    let harness = H::start();
    let mut client = harness.client(WHO);
    assert_eq!(client.send(b"last words"), Ok(10));
    drop(client);
    let mut other = harness.client(WHO);
    assert_eq!(other.send(b"later"), Ok(5));
    assert_eq!(receive(harness.target()), Some((WHO, b"last words".to_vec())));
    assert_eq!(receive(harness.target()), Some((WHO, b"later".to_vec())));
    assert_eq!(receive(harness.target()), None);
}

pub fn a_reply_reaches_the_endpoint_that_asked<H: Harness>() {
    let harness = H::start();
    let target = harness.target();
    // The endpoints are of one host and tenant. Only their numbers differ.
    let (mut one, mut two) = (harness.client(WHO), harness.client(WHO));
    assert_eq!((two.send(b"from two"), one.send(b"from one")), (Ok(8), Ok(8)));
    let (second, message) = receive_from(target).unwrap();
    assert_eq!((second.who, &message[..]), (WHO, &b"from two"[..]));
    let (first, _) = receive_from(target).unwrap();
    assert_ne!(first.endpoint, second.endpoint);
    assert!(target.reply(second.endpoint, b"to two") && target.reply(first.endpoint, b"to one"));
    for (client, expected) in [(&mut two, b"to two"), (&mut one, b"to one")] {
        let mut out = Vec::new();
        while !client.endpoint.receive(&mut out) {
            harness.pass_time();
        }
        assert_eq!(&out, expected);
        assert!(!client.endpoint.receive(&mut out), "the reply to the other one");
        // After this message the target knows that the reply was taken.
        assert_eq!(client.send(b"taken"), Ok(5));
        assert!(receive_from(target).is_some());
    }
    assert!(!target.reply(first.endpoint, &[1; 513]), "the message is too long");
    for _ in 0..LIMITS.receive_depth {
        assert!(target.reply(first.endpoint, b"x"));
    }
    assert!(!target.reply(first.endpoint, b"x"), "there is no room");
    assert!(target.reply(second.endpoint, b"x"), "another endpoint has room");
    assert!(!target.reply(EndpointNumber(u64::MAX), b"x"), "there is no such endpoint");
    target.fence(HOST, WHO.epoch);
    assert!(!target.reply(second.endpoint, b"x"), "the endpoint is fenced");
}

pub fn numbers_of_endpoints_are_never_reused<H: Harness>() {
    let harness = H::start();
    let target = harness.target();
    let mut numbers = Vec::new();
    for _ in 0..20 {
        let mut client = harness.client(WHO);
        assert_eq!(client.send(b"x"), Ok(1));
        let (from, _) = receive_from(target).unwrap();
        assert!(!numbers.contains(&from.endpoint));
        drop(client);
        // The target detects the end of a connection with a delay.
        while target.endpoints() > 0 {
            harness.pass_time();
        }
        assert!(!target.reply(from.endpoint, b"x"), "the endpoint is gone");
        numbers.push(from.endpoint);
    }
}
