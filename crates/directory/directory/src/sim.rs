//! A directory in memory with virtual time and injected faults, for simulators and tests.
//!
//! A [`DirectoryWorld`] is the directory. Each host of a simulation has a [`SimDirectory`] with its
//! own faults.
//! No call blocks: a watch returns the events that exist.
//! Time passes only by [`DirectoryWorld::advance`] and by the delays of [`SimDirectory::delay`].

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::{Clock, ManualClock, saturating_ms};
use crate::core::Core;
use crate::engine::{Engine, EngineWatch, VolatileStore};
use crate::model::{DirectoryEntry, Lease, LeaseId, Listing, Transaction, TransactionOutcome, WatchEvent};
use crate::{Directory, DirectoryError, Watch};

/// A simulated directory and its virtual time.
#[derive(Clone, Debug)]
pub struct DirectoryWorld {
    engine: Arc<Engine>,
    clock: Arc<ManualClock>,
    seed: u64,
}

/// The kind of an injected fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallFault {
    /// The request is lost: the call has no effect.
    Lost,
    /// The answer is lost: the call takes effect.
    AnswerLost,
}

/// A host's access to a simulated directory.
#[derive(Clone, Debug)]
pub struct SimDirectory {
    world: DirectoryWorld,
    faults: Arc<Mutex<FaultPlan>>,
}

/// The faults of a host.
#[derive(Debug)]
struct FaultPlan {
    /// The state of the generator of delays.
    random_state: u64,
    delay_ms_max: u64,
    is_disconnected: bool,
    /// The next fault, and the number of calls until it.
    next: Option<(u32, CallFault)>,
}

impl DirectoryWorld {
    /// Creates an empty directory at time 0. Equal seeds cause equal delays.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::default());
        let engine =
            Arc::new(Engine::new(Core::new(), Box::new(VolatileStore), Arc::clone(&clock) as Arc<dyn Clock>));
        Self { engine, clock, seed }
    }

    /// Creates the access of a host. `name` seeds its delays.
    #[must_use]
    pub fn host(&self, name: u64) -> SimDirectory {
        let random_state = self.seed ^ name.wrapping_mul(0xd134_2543_de82_ef95);
        let faults = FaultPlan { random_state, delay_ms_max: 0, is_disconnected: false, next: None };
        SimDirectory { world: self.clone(), faults: Arc::new(Mutex::new(faults)) }
    }

    /// The virtual time.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Advances the time, and ends the leases whose time is up.
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.engine.tick().expect("a simulated directory has no disk that could fail");
    }

    /// Ends a lease as if its time were up.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`].
    pub fn expire(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.engine.expire_now(id)
    }
}

impl SimDirectory {
    /// Delays each call from now on by a random virtual time of at most `longest`.
    pub fn delay(&self, longest: Duration) {
        self.faults.lock().delay_ms_max = saturating_ms(longest);
    }

    /// Makes the `count`-th call from now fail; 1 is the next call.
    pub fn fail(&self, count: u32, fault: CallFault) {
        self.faults.lock().next = Some((count, fault));
    }

    /// Disconnects this host from the directory, or reconnects it.
    ///
    /// While the host is disconnected, its calls fail and its watches report nothing.
    pub fn set_disconnected(&self, is_disconnected: bool) {
        self.faults.lock().is_disconnected = is_disconnected;
    }

    fn call<T>(
        &self,
        call: impl FnOnce(&Arc<Engine>) -> Result<T, DirectoryError>,
    ) -> Result<T, DirectoryError> {
        let (fault, delay_ms) = self.faults.lock().draw();
        self.world.advance(Duration::from_millis(delay_ms));
        if fault == Some(CallFault::Lost) {
            return Err(unavailable("the call was lost"));
        }
        let answer = call(&self.world.engine);
        if fault == Some(CallFault::AnswerLost) {
            return Err(unavailable("the answer was lost"));
        }
        answer
    }
}

impl FaultPlan {
    /// The fault and the delay of the next call.
    fn draw(&mut self) -> (Option<CallFault>, u64) {
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
        (if self.is_disconnected { Some(CallFault::Lost) } else { fault }, delay_ms)
    }

    /// The next number of the generator splitmix64.
    fn random(&mut self) -> u64 {
        self.random_state = self.random_state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random_state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl Directory for SimDirectory {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
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

/// A watch that does not wait.
#[derive(Debug)]
struct SimWatch {
    watch: EngineWatch,
    faults: Arc<Mutex<FaultPlan>>,
}

impl Watch for SimWatch {
    /// Ignores `timeout`.
    fn next(&mut self, _timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        if self.faults.lock().is_disconnected {
            return Ok(None);
        }
        self.watch.next(Duration::ZERO)
    }
}

fn unavailable(cause: &str) -> DirectoryError {
    DirectoryError::Unavailable { address: "sim".to_owned(), cause: cause.to_owned() }
}
