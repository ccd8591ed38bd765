//! An array of numbers on memory nodes: fills, reverses and sums it.
//!
//! The process holds 64 KiB of the array at a time.
//!
//! Usage: `far_array [NUMBERS]`, by default a million. A cluster must run (`aquifer up`).

use std::error::Error;

use aquifer_client::{Extent, ReadJob, Session, WriteJob};

/// Maximum number of numbers that one job reads or writes.
const CHUNK: usize = 8192;
/// Size of a number in bytes.
const BYTES: usize = size_of::<u64>();

struct FarArray {
    session: Session,
    extent: Extent,
    len: usize,
}

impl FarArray {
    fn new(len: usize) -> Result<Self, aquifer_client::Error> {
        let mut session = Session::open()?;
        let extent = session.allocate((len * BYTES) as u64)?;
        Ok(Self { session, extent, len })
    }

    fn read(&mut self, first: usize, numbers: &mut [u64]) -> Result<(), aquifer_client::Error> {
        let mut bytes = vec![0; numbers.len() * BYTES];
        self.session.read(&self.extent, (first * BYTES) as u64, &mut bytes)?;
        for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<BYTES>().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn write(&mut self, first: usize, numbers: &[u64]) -> Result<(), aquifer_client::Error> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.session.write(&self.extent, (first * BYTES) as u64, &bytes)
    }

    /// Swaps two chunks and reverses each, in one round trip for the reads and one for the writes.
    fn swap_reversed(
        &mut self,
        first: usize,
        second: usize,
        len: usize,
    ) -> Result<(), aquifer_client::Error> {
        let (mut front, mut back) = (vec![0; len * BYTES], vec![0; len * BYTES]);
        let at = |number: usize| (number * BYTES) as u64;
        self.session.read_many(&mut [
            ReadJob { extent: self.extent, offset: at(first), out: &mut front },
            ReadJob { extent: self.extent, offset: at(second), out: &mut back },
        ])?;
        for bytes in [&mut front, &mut back] {
            bytes.as_chunks_mut::<BYTES>().0.reverse();
        }
        self.session.write_many(&[
            WriteJob { extent: self.extent, offset: at(first), bytes: &back },
            WriteJob { extent: self.extent, offset: at(second), bytes: &front },
        ])
    }

    fn reverse(&mut self) -> Result<(), aquifer_client::Error> {
        let (mut front, mut back) = (0, self.len);
        while back - front > 1 {
            let len = CHUNK.min((back - front) / 2);
            self.swap_reversed(front, back - len, len)?;
            front += len;
            back -= len;
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let len = std::env::args().nth(1).map_or(Ok(1_000_000), |text| text.parse())?;
    let mut array = FarArray::new(len)?;
    let mut numbers: Vec<u64> = Vec::with_capacity(CHUNK);
    for first in (0..len).step_by(CHUNK) {
        numbers.clear();
        numbers.extend((first..len.min(first + CHUNK)).map(|number| number as u64));
        array.write(first, &numbers)?;
    }
    array.reverse()?;
    let mut sum = 0_u128;
    for first in (0..len).step_by(CHUNK) {
        numbers.resize(CHUNK.min(len - first), 0);
        array.read(first, &mut numbers)?;
        for (number, at) in numbers.iter().zip(first..) {
            assert_eq!(*number, (len - 1 - at) as u64, "the array was reversed");
            sum += u128::from(*number);
        }
    }
    println!("{len} numbers, reversed; their sum is {sum}");
    array.session.free(array.extent)?;
    Ok(())
}
