//! A checker of linearisability for histories of operations on one key.

use std::collections::HashSet;

use shuttle::sync::{Arc, Mutex};

/// An operation with its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// A read, with the value that it returned.
    Get(Option<u64>),
    /// A put of a value.
    Put(u64),
    /// A deletion, with whether there was a value.
    Delete(bool),
}

#[derive(Clone, Copy, Debug)]
struct Event {
    operation: Operation,
    began: u64,
    /// `u64::MAX` if the operation did not end: it may have taken effect.
    ended: u64,
}

#[derive(Debug, Default)]
struct Events {
    events: Vec<Event>,
    time: u64,
}

/// The operations of all clients on one key.
#[derive(Clone, Debug)]
pub struct History(Arc<Mutex<Events>>);

impl History {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Events::default())))
    }

    /// Records that an operation begins. Its result is not known yet.
    pub fn begin(&self, operation: Operation) -> usize {
        let mut events = self.0.lock().expect("no client panics");
        events.time += 1;
        let began = events.time;
        events.events.push(Event { operation, began, ended: u64::MAX });
        events.events.len() - 1
    }

    /// Records that an operation has ended, with its result.
    pub fn end(&self, pending: usize, operation: Operation) {
        let mut events = self.0.lock().expect("no client panics");
        events.time += 1;
        let ended = events.time;
        let event = &mut events.events[pending];
        (event.operation, event.ended) = (operation, ended);
    }

    /// Checks that the operations are linearisable.
    ///
    /// # Panics
    /// If no order in which each operation takes effect between its begin and its end has these
    /// results.
    pub fn check(&self) {
        let events = &self.0.lock().expect("no client panics").events;
        assert!(is_explained(events, None, 0, &mut HashSet::new()), "no order explains {events:#?}");
    }
}

/// Whether the operations that are not in `done` can follow when the key has `value`.
fn is_explained(
    events: &[Event],
    value: Option<u64>,
    done: u64,
    refuted: &mut HashSet<(Option<u64>, u64)>,
) -> bool {
    if !refuted.insert((value, done)) {
        return false;
    }
    let left = || events.iter().enumerate().filter(|(at, _)| done >> at & 1 == 0);
    let Some(first_end) = left().map(|(_, event)| event.ended).min() else { return true };
    if first_end == u64::MAX {
        return true;
    }
    // The next operation must have begun before any other one ended.
    left().filter(|(_, event)| event.began < first_end).any(|(at, event)| {
        let next = match event.operation {
            Operation::Put(number) => Some(Some(number)),
            Operation::Get(_) if event.ended == u64::MAX => Some(value),
            Operation::Delete(_) if event.ended == u64::MAX => Some(None),
            Operation::Get(found) => (found == value).then_some(value),
            Operation::Delete(was_there) => (was_there == value.is_some()).then_some(None),
        };
        next.is_some_and(|next| is_explained(events, next, done | 1 << at, refuted))
    })
}

#[test]
fn only_possible_histories_are_explained() {
    use Operation::{Delete, Get, Put};
    let event = |operation, began, ended| Event { operation, began, ended };
    let is_explained = |events: &[Event]| is_explained(events, None, 0, &mut HashSet::new());
    assert!(is_explained(&[event(Put(1), 1, 2), event(Get(Some(1)), 3, 4)]));
    assert!(!is_explained(&[event(Put(1), 1, 2), event(Get(None), 3, 4)]), "stale");
    assert!(is_explained(&[event(Put(1), 1, 4), event(Get(None), 2, 3)]), "at once");
    assert!(is_explained(&[
        event(Put(1), 1, u64::MAX),
        event(Get(Some(1)), 2, 3),
        event(Get(Some(1)), 4, 5)
    ]));
    let flicker = [event(Put(1), 1, u64::MAX), event(Get(Some(1)), 2, 3), event(Get(None), 4, 5)];
    assert!(!is_explained(&flicker));
    assert!(!is_explained(&[event(Put(1), 1, 2), event(Delete(true), 3, 4), event(Delete(true), 5, 6)]));
}
