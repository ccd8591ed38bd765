//! One READ of a page from another process: the lower bound of a fault that reads a page over the
//! fabric.

use aquifer::Fabric;
use aquifer_bench::BenchError;

use super::link::Link;
use super::measure::{self, Kind, Place, Volume};
use super::wire;

/// A serving process, which ends when this is dropped.
#[derive(Debug)]
pub struct ReadFloor {
    fabric: Fabric,
    link: Link,
}

impl ReadFloor {
    /// Starts the serving process.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(fabric: Fabric) -> Result<Self, BenchError> {
        Ok(Self { fabric, link: Link::start(0)? })
    }

    /// Latency of a READ of 4 KiB that is in no processor cache, in µs.
    ///
    /// # Errors
    /// If a READ fails, or a signal asks to stop.
    pub fn measure_us(&mut self) -> Result<f64, BenchError> {
        if self.fabric == Fabric::Tcp {
            let (verbs, _) = self.link.tcp_addresses.expect("the serving process was started");
            return wire::read_p50_us(self.link.server(), verbs);
        }
        let volume = Volume { rounds: 1, ..Volume::QUICK };
        let verb_ns = measure::verb(&mut self.link, volume, Kind::Read, 4096, Place::Cold)?;
        Ok(verb_ns[0] / 1000.0)
    }
}
