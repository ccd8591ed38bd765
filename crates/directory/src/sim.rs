//! A directory in memory, in virtual time, with faults on demand: what simulators and tests of other crates use.
//!
//! A [`World`] is the directory; each host of a simulation gets a [`SimDirectory`] of its own, whose faults are its own.
//! Nothing blocks: a watch returns what there is, and time passes only when it is told to, or by the delays that were asked for.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::clock::{Clock, ManualClock, saturating_ms};
use crate::core::Core;
use crate::engine::{Engine, EngineWatch, Nowhere};
use crate::model::{Entry, Event, Lease, LeaseId, Listing, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError, Watch};

/// A simulated directory and its time.
#[derive(Clone, Debug)]
pub struct World {
    engine: Arc<Engine>,
    clock: Arc<ManualClock>,
    seed: u64,
}

/// How a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It never arrives.
    Lost,
    /// It is carried out and its answer is lost.
    AnswerLost,
}

/// One host's access to the directory.
#[derive(Clone, Debug)]
pub struct SimDirectory {
    world: World,
    faults: Arc<Mutex<Faults>>,
}

#[derive(Debug)]
struct Faults {
    random: u64,
    delay_ms_max: u64,
    cut_off: bool,
    next: Option<(u32, Fault)>,
}

impl World {
    /// An empty directory at time 0. The same seed gives the same delays.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::default());
        let engine =
            Arc::new(Engine::new(Core::new(), Box::new(Nowhere), Arc::clone(&clock) as Arc<dyn Clock>));
        Self { engine, clock, seed }
    }

    /// Access for one host; `name` varies its delays.
    #[must_use]
    pub fn host(&self, name: u64) -> SimDirectory {
        let random = self.seed ^ name.wrapping_mul(0xd134_2543_de82_ef95);
        let faults = Faults { random, delay_ms_max: 0, cut_off: false, next: None };
        SimDirectory { world: self.clone(), faults: Arc::new(Mutex::new(faults)) }
    }

    /// The time.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Let time pass; leases whose time is up end.
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.engine.tick().expect("a simulated directory has no disk that could fail");
    }

    /// End a lease as if its time were up.
    ///
    /// # Errors
    /// The lease is gone.
    pub fn expire(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.engine.expire_now(id)
    }
}

impl SimDirectory {
    /// From now on every call takes a random virtual time of at most `longest` before it is carried out.
    pub fn delay(&self, longest: Duration) {
        self.lock().delay_ms_max = saturating_ms(longest);
    }

    /// The `count`-th call from now (1 = the next) fails so.
    pub fn fail(&self, count: u32, fault: Fault) {
        self.lock().next = Some((count, fault));
    }

    /// Cut this host off from the directory, or let it back. While it is cut off its watches see nothing.
    pub fn cut_off(&self, cut_off: bool) {
        self.lock().cut_off = cut_off;
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().expect("no holder of the faults panics")
    }

    fn call<T>(
        &self,
        call: impl FnOnce(&Arc<Engine>) -> Result<T, DirectoryError>,
    ) -> Result<T, DirectoryError> {
        let (fault, delay_ms) = self.lock().draw();
        self.world.advance(Duration::from_millis(delay_ms));
        if fault == Some(Fault::Lost) {
            return Err(unavailable("the call was lost"));
        }
        let answer = call(&self.world.engine);
        if fault == Some(Fault::AnswerLost) {
            return Err(unavailable("the answer was lost"));
        }
        answer
    }
}

impl Faults {
    fn draw(&mut self) -> (Option<Fault>, u64) {
        let delay_ms = if self.delay_ms_max == 0 { 0 } else { self.random() % (self.delay_ms_max + 1) };
        let fault = match &mut self.next {
            Some((1, fault)) => Some(*fault),
            Some((count, _)) => {
                *count = count.saturating_sub(1);
                None
            }
            None => None,
        };
        if fault.is_some() {
            self.next = None;
        }
        (if self.cut_off { Some(Fault::Lost) } else { fault }, delay_ms)
    }

    /// splitmix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl Directory for SimDirectory {
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        self.call(|engine| engine.get(key))
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.call(|engine| engine.list(prefix))
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.call(|engine| engine.transaction(transaction))
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.call(|engine| engine.lease_grant(ttl))
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(|engine| engine.lease_keep_alive(id))
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(|engine| engine.lease_revoke(id))
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        let watch = self.call(|engine| engine.watch(prefix, from_revision))?;
        Ok(Box::new(SimWatch { watch, faults: Arc::clone(&self.faults) }))
    }
}

/// A watch that never waits.
#[derive(Debug)]
struct SimWatch {
    watch: EngineWatch,
    faults: Arc<Mutex<Faults>>,
}

impl Watch for SimWatch {
    /// What there is now; `timeout` does not matter.
    fn next(&mut self, _timeout: Duration) -> Result<Option<Event>, DirectoryError> {
        if self.faults.lock().expect("no holder of the faults panics").cut_off {
            return Ok(None);
        }
        self.watch.next(Duration::ZERO)
    }
}

fn unavailable(cause: &str) -> DirectoryError {
    DirectoryError::Unavailable { address: "sim".to_owned(), cause: cause.to_owned() }
}
