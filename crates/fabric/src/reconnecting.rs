//! Endpoints that outlive an absence of their target: its process is started anew while its memory is kept elsewhere, or it cannot be reached for a while.
//!
//! A [`ReconnectingEndpoint`] stands around one endpoint after another, each to the same memory: same addresses, same keys. What was under way when one broke may
//! or may not have been done. READs and WRITEs can be done once more, and are, in their order, when the target is back ([`AwayPolicy::Wait`]); swaps and messages
//! cannot, and end with [`WorkError::Away`]. Nothing of the endpoint before takes effect any more by then ([`DrainHandle`]).
//!
//! What is done once more is a little less than a connection that never broke: a READ may find what a later WRITE of the same endpoint has written, and others may see a word go
//! back to an earlier WRITE's for a moment if several were under way to it. So it is for memory that its user has alone, as pages are,
//! or that users share who know of it, as extents are.

mod reconnector;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use crate::Memory;
use crate::locals::LocalMemories;
use crate::target::Region;
use crate::work::{
    Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, PostError, Verb, Work, WorkError,
};
pub use reconnector::{Reconnect, ReconnectOutcome};
use reconnector::{Reconnector, SharedDrain};

/// Completions posted from an endpoint at a time.
const POLL_MAX: usize = 64;

/// What becomes of work while the target is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AwayPolicy {
    /// READs and WRITEs wait for it.
    Wait,
    /// Everything ends at once with [`WorkError::Away`], as does all that is posted until it is back.
    Fail,
}

/// See above.
#[derive(Debug)]
pub struct ReconnectingEndpoint {
    state: ReconnectState,
    policy: AwayPolicy,
    reconnect: Arc<dyn Reconnect>,
    /// As the first endpoint said.
    regions: Vec<Region>,
    limits: Limits,
    locals: LocalMemories,
    /// Posted to the endpoint that is there, in this order.
    in_flight: VecDeque<InFlightWork>,
    /// To be posted after that, to this endpoint or the next.
    waiting: VecDeque<Work>,
    done: VecDeque<Completion>,
    polled: Vec<Completion>,
    /// The target refuses this host for good: it is not waited for.
    is_fenced: bool,
}

#[derive(Debug)]
enum ReconnectState {
    Connected(Box<dyn Endpoint>),
    Away(Reconnector),
    /// It does not come back, or does not let us in; what whoever posts is told.
    Failed(Option<Reconnector>, WorkError),
}

#[derive(Clone, Copy, Debug)]
struct InFlightWork {
    work: Work,
    /// The endpoint broke over it. Whether it was done nobody knows: also of what was flushed not every device does.
    is_unknown: bool,
}

/// What there is to know of a target's memory: enough for an endpoint that waits for it.
#[derive(Clone, Debug)]
pub struct TargetDescription {
    regions: Vec<Region>,
    limits: Limits,
}

impl TargetDescription {
    /// By who is connected.
    #[must_use]
    pub fn of(endpoint: &dyn Endpoint) -> Self {
        Self { regions: endpoint.regions().to_vec(), limits: endpoint.limits() }
    }
}

impl ReconnectingEndpoint {
    /// Around an endpoint; `reconnect` makes others to the same memory.
    #[must_use]
    pub fn new(endpoint: Box<dyn Endpoint>, reconnect: Arc<dyn Reconnect>, policy: AwayPolicy) -> Self {
        let target = TargetDescription::of(&*endpoint);
        Self::with_state(target, ReconnectState::Connected(endpoint), reconnect, policy)
    }

    /// To memory that was seen before, and whose target is away.
    #[must_use]
    pub fn to_away_target(
        target: TargetDescription,
        reconnect: Arc<dyn Reconnect>,
        policy: AwayPolicy,
    ) -> Self {
        let state = Self::start_reconnecting(&reconnect, None);
        Self::with_state(target, state, reconnect, policy)
    }

    fn with_state(
        target: TargetDescription,
        state: ReconnectState,
        reconnect: Arc<dyn Reconnect>,
        policy: AwayPolicy,
    ) -> Self {
        let TargetDescription { regions, limits } = target;
        Self {
            regions,
            limits,
            state,
            policy,
            reconnect,
            locals: LocalMemories::default(),
            in_flight: VecDeque::new(),
            done: VecDeque::new(),
            polled: Vec::with_capacity(POLL_MAX),
            waiting: VecDeque::new(),
            is_fenced: false,
        }
    }

    fn start_reconnecting(reconnect: &Arc<dyn Reconnect>, drain: Option<SharedDrain>) -> ReconnectState {
        Reconnector::start(reconnect, drain).map_or_else(
            |error| {
                tracing::warn!(%error, "no thread to find a target that is away");
                ReconnectState::Failed(None, WorkError::PeerGone)
            },
            ReconnectState::Away,
        )
    }

    fn fail(&mut self, work: Work, error: WorkError) {
        self.done.push_back(Completion { id: work.id, outcome: Err(error) });
    }

    /// Take completions of the endpoint that is there, if one is; whether there were any, or it turned out to be broken.
    fn poll_endpoint(&mut self) -> bool {
        let ReconnectState::Connected(endpoint) = &mut self.state else { return false };
        let mut polled = std::mem::take(&mut self.polled);
        endpoint.poll(&mut polled, POLL_MAX);
        let has_any = !polled.is_empty();
        let is_broken = !has_any && endpoint.is_broken();
        polled.drain(..).for_each(|completion| self.complete(completion));
        self.polled = polled;
        if is_broken {
            self.disconnect();
        } else if has_any {
            self.post_waiting();
        }
        has_any || is_broken
    }

    fn complete(&mut self, completion: Completion) {
        let is_it = |posted: &InFlightWork| !posted.is_unknown && posted.work.id == completion.id;
        let Some(mut at) = self.in_flight.iter().position(is_it) else { return };
        match completion.outcome {
            Err(WorkError::PeerGone | WorkError::Timeout | WorkError::Flushed) if !self.is_fenced => {
                self.in_flight[at].is_unknown = true;
            }
            outcome => {
                self.is_fenced |= outcome == Err(WorkError::Fenced);
                // What was posted before, and has not asked for a completion, is done, too.
                let is_unsignalled = |posted: &InFlightWork| !posted.is_unknown && !posted.work.signalled;
                for before in (0..at).rev() {
                    if is_unsignalled(&self.in_flight[before]) {
                        self.in_flight.remove(before);
                        at -= 1;
                    }
                }
                self.in_flight.remove(at);
                self.done.push_back(completion);
            }
        }
    }

    /// The endpoint is broken, and has told all that it had to tell.
    fn disconnect(&mut self) {
        let ReconnectState::Connected(endpoint) = &self.state else { return };
        if self.is_fenced {
            self.fail_all(None, WorkError::Fenced);
            return;
        }
        let drain = endpoint.drain_handle().map(SharedDrain::new);
        tracing::debug!(in_flight = self.in_flight.len(), "a target is away");
        // The endpoint is dropped before another is made.
        self.state = ReconnectState::Failed(None, WorkError::PeerGone);
        self.state = Self::start_reconnecting(&self.reconnect, drain);
        let waiting = std::mem::take(&mut self.waiting);
        for InFlightWork { work, .. } in std::mem::take(&mut self.in_flight) {
            let is_repeatable = matches!(work.verb, Verb::Read { .. } | Verb::Write { .. });
            if self.policy == AwayPolicy::Wait && is_repeatable {
                self.waiting.push_back(work);
            } else {
                self.fail(work, WorkError::Away);
            }
        }
        match self.policy {
            AwayPolicy::Wait => self.waiting.extend(waiting),
            AwayPolicy::Fail => waiting.into_iter().for_each(|work| self.fail(work, WorkError::Away)),
        }
    }

    /// Whether the target is back, or does not come back.
    fn poll_reconnector(&mut self) -> bool {
        let ReconnectState::Away(reconnector) = &mut self.state else { return false };
        let Some(found) = reconnector.take_result() else { return false };
        let ReconnectState::Away(reconnector) =
            std::mem::replace(&mut self.state, ReconnectState::Failed(None, WorkError::PeerGone))
        else {
            return false;
        };
        match found.and_then(|endpoint| self.attach(endpoint)) {
            Some(endpoint) => {
                tracing::debug!(waiting = self.waiting.len(), "a target is back");
                self.state = ReconnectState::Connected(endpoint);
                self.post_waiting();
            }
            None => self.fail_all(Some(reconnector), WorkError::PeerGone),
        }
        true
    }

    /// The endpoint, if it is to the same memory, with all local memory under the same keys.
    fn attach(&mut self, mut endpoint: Box<dyn Endpoint>) -> Option<Box<dyn Endpoint>> {
        if self.regions != endpoint.regions() {
            return None;
        }
        for (number, memory) in (1..).zip(self.locals.iter()) {
            let registered = endpoint.register_local(Arc::clone(memory));
            if !registered.is_ok_and(|key| key == LocalKey(number)) {
                return None;
            }
        }
        Some(endpoint)
    }

    fn fail_all(&mut self, reconnector: Option<Reconnector>, cause: WorkError) {
        self.state = ReconnectState::Failed(reconnector, cause);
        let left = self.in_flight.drain(..).map(|posted| posted.work).chain(self.waiting.drain(..));
        let ended = left.map(|work| Completion { id: work.id, outcome: Err(cause) });
        self.done.extend(ended);
    }

    /// Post what has waited, as far as there is room.
    fn post_waiting(&mut self) {
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            let (first, last) = waiting.as_slices();
            self.post_now(first);
            self.post_now(last);
        }
    }

    /// Post it if that is possible now, behind what has waited for longer; else it waits, too.
    fn post_now(&mut self, batch: &[Work]) {
        let ReconnectState::Connected(endpoint) = &mut self.state else {
            self.waiting.extend(batch);
            return;
        };
        // One that is broken is left to be found so.
        let accepted = if !self.waiting.is_empty() || endpoint.is_broken() {
            0
        } else {
            match endpoint.post(batch) {
                Ok(()) => batch.len(),
                Err(PostError::QueueFull { accepted }) => accepted,
            }
        };
        let (posted, left) = batch.split_at(accepted);
        self.in_flight.extend(posted.iter().map(|work| InFlightWork { work: *work, is_unknown: false }));
        self.waiting.extend(left);
    }
}

impl Endpoint for ReconnectingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let depth = self.limits.queue_depth;
        let accepted = batch
            .len()
            .min(depth.saturating_sub(self.in_flight.len() + self.waiting.len() + self.done.len()));
        let posted = &batch[..accepted];
        // Who is told at once may never come to wait for anything.
        self.poll_reconnector();
        match (&self.state, self.policy) {
            (ReconnectState::Failed(_, cause), _) => {
                let cause = *cause;
                posted.iter().for_each(|work| self.fail(*work, cause));
            }
            (ReconnectState::Away(_), AwayPolicy::Fail) => {
                posted.iter().for_each(|work| self.fail(*work, WorkError::Away))
            }
            (ReconnectState::Away(_), AwayPolicy::Wait) | (ReconnectState::Connected(_), _) => {
                self.post_now(posted);
            }
        }
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        while self.done.is_empty() && (self.poll_endpoint() || self.poll_reconnector()) {}
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.done.is_empty() {
            return;
        }
        match &mut self.state {
            ReconnectState::Connected(endpoint) => endpoint.wait(timeout),
            ReconnectState::Away(reconnector) => reconnector.wait(timeout),
            ReconnectState::Failed(..) => {}
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        let reconnector = match &self.state {
            ReconnectState::Connected(endpoint) => return endpoint.poll_fd(),
            ReconnectState::Away(reconnector) => Some(reconnector),
            ReconnectState::Failed(reconnector, _) => reconnector.as_ref(),
        };
        Some(PollFd::from_borrowed_fd(reconnector?.ready_fd()?, PollFlags::IN))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        if let ReconnectState::Connected(endpoint) = &mut self.state {
            endpoint.register_local(Arc::clone(&memory))?;
        }
        // Providers number them from one on, which is what makes an endpoint replaceable by another.
        self.locals.add(memory, self.limits.local_regions_max)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        match &mut self.state {
            ReconnectState::Connected(endpoint) => endpoint.receive(out),
            ReconnectState::Away(_) | ReconnectState::Failed(..) => false,
        }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        matches!(self.state, ReconnectState::Failed(..))
    }

    fn is_away(&self) -> bool {
        matches!(self.state, ReconnectState::Away(_))
    }

    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        match &self.state {
            ReconnectState::Connected(endpoint) => endpoint.drain_handle(),
            ReconnectState::Away(reconnector) | ReconnectState::Failed(Some(reconnector), _) => {
                reconnector.drain_handle().map(|drain| Box::new(drain) as Box<dyn DrainHandle>)
            }
            ReconnectState::Failed(None, _) => None,
        }
    }
}
