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
use crate::locals::Locals;
use crate::target::Region;
use crate::work::{
    Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, PostError, Verb, Work, WorkError,
};
pub use reconnector::{Reconnect, ReconnectOutcome};
use reconnector::{Reconnector, SharedDrain};

/// Completions taken from an endpoint at a time.
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
    state: State,
    policy: AwayPolicy,
    reconnect: Arc<dyn Reconnect>,
    /// As the first endpoint said.
    regions: Vec<Region>,
    limits: Limits,
    locals: Locals,
    /// Posted to the endpoint that is there, in this order.
    under_way: VecDeque<UnderWay>,
    /// To be posted after that, to this endpoint or the next.
    waiting: VecDeque<Work>,
    done: VecDeque<Completion>,
    polled: Vec<Completion>,
    /// The target refuses this host for good: it is not waited for.
    is_shut_out: bool,
}

#[derive(Debug)]
enum State {
    Here(Box<dyn Endpoint>),
    Away(Reconnector),
    /// It does not come back, or does not let us in; what whoever posts is told.
    Over(Option<Reconnector>, WorkError),
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    work: Work,
    /// The endpoint broke over it. Whether it was done nobody knows: also of what was flushed not every device does.
    is_doubtful: bool,
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
        let seen = TargetDescription::of(&*endpoint);
        Self::begin(seen, State::Here(endpoint), reconnect, policy)
    }

    /// To memory that was seen before, and whose target is away.
    #[must_use]
    pub fn to_away_target(
        seen: TargetDescription,
        reconnect: Arc<dyn Reconnect>,
        policy: AwayPolicy,
    ) -> Self {
        let state = Self::reconnector(&reconnect, None);
        Self::begin(seen, state, reconnect, policy)
    }

    fn begin(
        seen: TargetDescription,
        state: State,
        reconnect: Arc<dyn Reconnect>,
        policy: AwayPolicy,
    ) -> Self {
        let TargetDescription { regions, limits } = seen;
        Self {
            regions,
            limits,
            state,
            policy,
            reconnect,
            locals: Locals::default(),
            under_way: VecDeque::new(),
            done: VecDeque::new(),
            polled: Vec::with_capacity(POLL_MAX),
            waiting: VecDeque::new(),
            is_shut_out: false,
        }
    }

    fn reconnector(reconnect: &Arc<dyn Reconnect>, late: Option<SharedDrain>) -> State {
        Reconnector::start(reconnect, late).map_or_else(
            |error| {
                tracing::warn!(%error, "no thread to find a target that is away");
                State::Over(None, WorkError::PeerGone)
            },
            State::Away,
        )
    }

    fn end(&mut self, work: Work, error: WorkError) {
        self.done.push_back(Completion { id: work.id, outcome: Err(error) });
    }

    /// Take completions of the endpoint that is there, if one is; whether there were any, or it turned out to be broken.
    fn look(&mut self) -> bool {
        let State::Here(endpoint) = &mut self.state else { return false };
        let mut polled = std::mem::take(&mut self.polled);
        endpoint.poll(&mut polled, POLL_MAX);
        let has_any = !polled.is_empty();
        let is_broken = !has_any && endpoint.is_broken();
        polled.drain(..).for_each(|completion| self.settle(completion));
        self.polled = polled;
        if is_broken {
            self.lose();
        } else if has_any {
            self.post_waiting();
        }
        has_any || is_broken
    }

    fn settle(&mut self, completion: Completion) {
        let is_it = |posted: &UnderWay| !posted.is_doubtful && posted.work.id == completion.id;
        let Some(mut at) = self.under_way.iter().position(is_it) else { return };
        match completion.outcome {
            Err(WorkError::PeerGone | WorkError::Timeout | WorkError::Flushed) if !self.is_shut_out => {
                self.under_way[at].is_doubtful = true;
            }
            outcome => {
                self.is_shut_out |= outcome == Err(WorkError::Fenced);
                // What was posted before, and has not asked for a completion, is done, too.
                let is_silent = |posted: &UnderWay| !posted.is_doubtful && !posted.work.signalled;
                for before in (0..at).rev() {
                    if is_silent(&self.under_way[before]) {
                        self.under_way.remove(before);
                        at -= 1;
                    }
                }
                self.under_way.remove(at);
                self.done.push_back(completion);
            }
        }
    }

    /// The endpoint is broken, and has told all that it had to tell.
    fn lose(&mut self) {
        let State::Here(endpoint) = &self.state else { return };
        if self.is_shut_out {
            self.give_up(None, WorkError::Fenced);
            return;
        }
        let late = endpoint.drain_handle().map(SharedDrain::new);
        tracing::debug!(under_way = self.under_way.len(), "a target is away");
        // The endpoint is dropped before another is made.
        self.state = State::Over(None, WorkError::PeerGone);
        self.state = Self::reconnector(&self.reconnect, late);
        let waiting = std::mem::take(&mut self.waiting);
        for UnderWay { work, .. } in std::mem::take(&mut self.under_way) {
            let is_repeatable = matches!(work.verb, Verb::Read { .. } | Verb::Write { .. });
            if self.policy == AwayPolicy::Wait && is_repeatable {
                self.waiting.push_back(work);
            } else {
                self.end(work, WorkError::Away);
            }
        }
        match self.policy {
            AwayPolicy::Wait => self.waiting.extend(waiting),
            AwayPolicy::Fail => waiting.into_iter().for_each(|work| self.end(work, WorkError::Away)),
        }
    }

    /// Whether the target is back, or does not come back.
    fn look_for_target(&mut self) -> bool {
        let State::Away(reconnector) = &mut self.state else { return false };
        let Some(found) = reconnector.outcome() else { return false };
        let State::Away(reconnector) =
            std::mem::replace(&mut self.state, State::Over(None, WorkError::PeerGone))
        else {
            return false;
        };
        match found.and_then(|endpoint| self.attach(endpoint)) {
            Some(endpoint) => {
                tracing::debug!(waiting = self.waiting.len(), "a target is back");
                self.state = State::Here(endpoint);
                self.post_waiting();
            }
            None => self.give_up(Some(reconnector), WorkError::PeerGone),
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

    fn give_up(&mut self, reconnector: Option<Reconnector>, cause: WorkError) {
        self.state = State::Over(reconnector, cause);
        let left = self.under_way.drain(..).map(|posted| posted.work).chain(self.waiting.drain(..));
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
        let State::Here(endpoint) = &mut self.state else {
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
        self.under_way.extend(posted.iter().map(|work| UnderWay { work: *work, is_doubtful: false }));
        self.waiting.extend(left);
    }
}

impl Endpoint for ReconnectingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let depth = self.limits.queue_depth;
        let accepted = batch
            .len()
            .min(depth.saturating_sub(self.under_way.len() + self.waiting.len() + self.done.len()));
        let taken = &batch[..accepted];
        // Who is told at once may never come to wait for anything.
        self.look_for_target();
        match (&self.state, self.policy) {
            (State::Over(_, cause), _) => {
                let cause = *cause;
                taken.iter().for_each(|work| self.end(*work, cause));
            }
            (State::Away(_), AwayPolicy::Fail) => {
                taken.iter().for_each(|work| self.end(*work, WorkError::Away))
            }
            (State::Away(_), AwayPolicy::Wait) | (State::Here(_), _) => {
                self.post_now(taken);
            }
        }
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        while self.done.is_empty() && (self.look() || self.look_for_target()) {}
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn wait(&mut self, patience: Duration) {
        if !self.done.is_empty() {
            return;
        }
        match &mut self.state {
            State::Here(endpoint) => endpoint.wait(patience),
            State::Away(reconnector) => reconnector.wait(patience),
            State::Over(..) => {}
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        let reconnector = match &self.state {
            State::Here(endpoint) => return endpoint.poll_fd(),
            State::Away(reconnector) => Some(reconnector),
            State::Over(reconnector, _) => reconnector.as_ref(),
        };
        Some(PollFd::from_borrowed_fd(reconnector?.bell()?, PollFlags::IN))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        if let State::Here(endpoint) = &mut self.state {
            endpoint.register_local(Arc::clone(&memory))?;
        }
        // Providers number them from one on, which is what makes an endpoint replaceable by another.
        self.locals.add(memory, self.limits.local_regions_max)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        match &mut self.state {
            State::Here(endpoint) => endpoint.receive(out),
            State::Away(_) | State::Over(..) => false,
        }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        matches!(self.state, State::Over(..))
    }

    fn is_away(&self) -> bool {
        matches!(self.state, State::Away(_))
    }

    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        match &self.state {
            State::Here(endpoint) => endpoint.drain_handle(),
            State::Away(reconnector) | State::Over(Some(reconnector), _) => {
                reconnector.drain_handle().map(|late| Box::new(late) as Box<dyn DrainHandle>)
            }
            State::Over(None, _) => None,
        }
    }
}
