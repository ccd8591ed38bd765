//! Clients of running heaps, and objects whose bytes they check.

use std::path::Path;

use aquifer_bench::BenchError;
use aquifer_bench::support::random::Random;
use aquifer_objects::client::HeapClient;
use aquifer_objects::pointer::Pointer;

/// A client over TCP, or one that shares memory with the service.
pub fn connect(agent: &Path, is_remote: bool) -> Result<HeapClient, BenchError> {
    let connected = if is_remote {
        HeapClient::connect_remotely(agent.to_owned(), None)
    } else {
        HeapClient::connect_at(agent.to_owned(), None)
    };
    connected.map_err(BenchError::heap)
}

/// The bytes of an object: its number in each word.
pub fn bytes_of(object: usize, size: usize) -> Vec<u8> {
    (object as u64).to_le_bytes().into_iter().cycle().take(size).collect()
}

/// Checks the bytes of an object.
pub fn check(object: usize, found: &[u8]) -> Result<(), BenchError> {
    match found == bytes_of(object, found.len()) {
        true => Ok(()),
        false => Err(BenchError::Wrong {
            program: "aquifer heap-service".into(),
            context: "a direct read".into(),
            what: format!("object {object} has other bytes than were written"),
        }),
    }
}

/// Allocates objects.
pub fn fill(client: &mut HeapClient, count: usize, size: usize) -> Result<Vec<Pointer>, BenchError> {
    (0..count).map(|object| client.create(&bytes_of(object, size)).map_err(BenchError::heap)).collect()
}

/// Divides objects at random: the ones to keep, with their numbers, and the `percent` of them to
/// free.
pub fn split(pointers: Vec<Pointer>, percent: usize) -> (Vec<(usize, Pointer)>, Vec<Pointer>) {
    let mut random = Random(11);
    let (mut left, mut freed) = (Vec::new(), Vec::new());
    for (object, pointer) in pointers.into_iter().enumerate() {
        if random.below(100) < percent { freed.push(pointer) } else { left.push((object, pointer)) }
    }
    (left, freed)
}
