//! One READ of a page from another process, alone: the floor for whoever reads pages.

use super::link::Link;
use super::measure::{self, Kind, Place, Volume};
use super::wire;
use crate::bench::BenchError;
use aquifer::Fabric;

/// Another process that lends memory, for as long as it is needed.
#[derive(Debug)]
pub struct ReadFloor {
    fabric: Fabric,
    link: Link,
}

impl ReadFloor {
    /// Starts the other process.
    ///
    /// # Errors
    /// If it cannot be.
    pub fn start(fabric: Fabric) -> Result<Self, BenchError> {
        Ok(Self { fabric, link: Link::start()? })
    }

    /// One cold READ of 4 KiB, in µs.
    ///
    /// # Errors
    /// If a READ fails, or a signal asks to stop.
    pub fn measure_us(&mut self) -> Result<f64, BenchError> {
        if self.fabric == Fabric::Tcp {
            let (verbs, _) = self.link.elsewhere.expect("it was started, not connected to");
            return wire::read_p50_us(self.link.server(), verbs);
        }
        let volume = Volume { rounds: 1, ..Volume::QUICK };
        let pair = measure::pair(&mut self.link, volume, Kind::Read, 4096, Place::Cold, 1)?;
        Ok(pair.verb_ns[0] / 1000.0)
    }
}
