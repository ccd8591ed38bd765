//! Endpoints that outlive the absence of their target, whose process restarts while its memory is
//! kept, or which is unreachable for a while.
//!
//! A [`ReconnectingEndpoint`] wraps one endpoint after another to the same memory, with the same
//! addresses and keys. When an endpoint breaks, it is unknown which operations in flight were done.
//! With [`AwayPolicy::Wait`], READs and WRITEs are repeated in their order when the target is back.
//! Atomics and messages cannot be repeated and end with [`WorkError::Away`]. Before anything is
//! repeated, a [`DrainHandle`] makes sure that no operation of the broken endpoint takes effect
//! later.
//!
//! Repeating weakens the guarantees a little. A READ may return what a later WRITE of the same
//! endpoint wrote. With several WRITEs to one word in flight, another endpoint may see the word
//! return to an earlier value for a moment. So this is for memory with one user, such as pages, or
//! with users that tolerate it, such as extents.

mod reconnector;

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use crate::Memory;
use crate::locals::LocalMemories;
use crate::target::Region;
use crate::work::{
    Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, PostError, Verb, Work, WorkError,
};
pub use reconnector::{Reconnect, ReconnectOutcome};
use reconnector::{ReconnectAttempts, SharedDrain};

/// Number of completions taken from an endpoint at a time.
const POLL_MAX: usize = 64;
/// Longest sleep of a wait while work is held after a fence.
const HOLD_SLEEP_MAX: Duration = Duration::from_millis(100);

/// Handling of work while the target is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AwayPolicy {
    /// READs and WRITEs wait for the target.
    Wait,
    /// All work ends at once with [`WorkError::Away`] until the target is back.
    Fail,
}

/// Handling of work after the target has fenced this host.
///
/// A target fences a host because the host's lease has ended: the host was stopped, or cut off from
/// the directory. Its memory is not lost by that. Until other hosts free it, the next process of
/// the host resumes it with a new epoch, as after a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterFence {
    /// Work waits for the end of this process, as it would for a target that is away: with
    /// [`AwayPolicy::Wait`] it never completes, with [`AwayPolicy::Fail`] it ends with
    /// [`WorkError::Away`].
    Wait,
    /// Work ends with [`WorkError::Fenced`]. No process resumes the host.
    Fail,
}

/// An endpoint that reconnects when its target returns.
#[derive(Debug)]
pub struct ReconnectingEndpoint {
    state: ReconnectState,
    policy: AwayPolicy,
    after_fence: AfterFence,
    /// Makes further endpoints to the same memory. Without it, the endpoint ends with the first.
    reconnect: Option<Arc<dyn Reconnect>>,
    /// Regions of the first endpoint.
    regions: Vec<Region>,
    /// Limits of the first endpoint.
    limits: Limits,
    locals: LocalMemories,
    /// Work posted to the current endpoint, in order.
    in_flight: VecDeque<InFlightWork>,
    /// Work to be posted after that, to this endpoint or the next.
    waiting: VecDeque<Work>,
    done: VecDeque<Completion>,
    polled: Vec<Completion>,
    /// The target has fenced this host, so it refuses further endpoints.
    is_fenced: bool,
    /// A descriptor that never becomes readable. It is polled while work is held after a fence:
    /// without one, a thread that waits would poll without a pause until this process ends.
    unreadable: Option<OwnedFd>,
    /// Values that are dropped when the endpoint is closed.
    owned: Vec<Box<dyn Any + Send>>,
}

#[derive(Debug)]
enum ReconnectState {
    Connected(Box<dyn Endpoint>),
    Away(ReconnectAttempts),
    /// The target does not return, or refuses this host. Posted work fails with the error.
    Failed(Option<ReconnectAttempts>, WorkError),
}

#[derive(Clone, Copy, Debug)]
struct InFlightWork {
    work: Work,
    /// The endpoint broke before the outcome was known. Some devices flush work that was done.
    is_unknown: bool,
}

/// The regions and limits of a target: enough to wait for it while it is away.
#[derive(Clone, Debug)]
pub struct TargetDescription {
    regions: Vec<Region>,
    limits: Limits,
}

impl TargetDescription {
    /// Describes the target to which an endpoint is connected.
    #[must_use]
    pub fn of(endpoint: &dyn Endpoint) -> Self {
        Self { regions: endpoint.regions().to_vec(), limits: endpoint.limits() }
    }
}

impl ReconnectingEndpoint {
    /// Wraps an endpoint; `reconnect` makes further endpoints to the same memory. Without it, the
    /// endpoint is broken when the first is.
    #[must_use]
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        reconnect: Option<Arc<dyn Reconnect>>,
        policy: AwayPolicy,
    ) -> Self {
        let target = TargetDescription::of(&*endpoint);
        Self::with_state(target, ReconnectState::Connected(endpoint), reconnect, policy)
    }

    /// Creates an endpoint to memory that was connected before and whose target is away now.
    #[must_use]
    pub fn to_away_target(
        target: TargetDescription,
        reconnect: Arc<dyn Reconnect>,
        policy: AwayPolicy,
    ) -> Self {
        let state = Self::start_reconnecting(&reconnect, None);
        Self::with_state(target, state, Some(reconnect), policy)
    }

    /// Sets the handling of work after a fence. Without this call, work fails.
    #[must_use]
    pub fn with_after_fence(mut self, after_fence: AfterFence) -> Self {
        self.after_fence = after_fence;
        self
    }

    /// Keeps a value until the endpoint is closed.
    #[must_use]
    pub fn owning(mut self, value: impl Any + Send) -> Self {
        self.owned.push(Box::new(value));
        self
    }

    fn with_state(
        target: TargetDescription,
        state: ReconnectState,
        reconnect: Option<Arc<dyn Reconnect>>,
        policy: AwayPolicy,
    ) -> Self {
        let TargetDescription { regions, limits } = target;
        Self {
            regions,
            limits,
            state,
            policy,
            after_fence: AfterFence::Fail,
            reconnect,
            locals: LocalMemories::default(),
            in_flight: VecDeque::new(),
            done: VecDeque::new(),
            polled: Vec::with_capacity(POLL_MAX),
            waiting: VecDeque::new(),
            is_fenced: false,
            unreadable: None,
            owned: Vec::new(),
        }
    }

    fn start_reconnecting(reconnect: &Arc<dyn Reconnect>, drain: Option<SharedDrain>) -> ReconnectState {
        ReconnectAttempts::start(reconnect, drain).map_or_else(
            |error| {
                tracing::warn!(%error, "cannot start a thread to reconnect; the endpoint is broken");
                ReconnectState::Failed(None, WorkError::PeerGone)
            },
            ReconnectState::Away,
        )
    }

    /// Ends an operation for its caller, unless it is held because of a fence.
    fn finish(&mut self, id: u64, outcome: Result<u64, WorkError>) {
        if outcome == Err(WorkError::Fenced) && !self.is_fenced {
            self.is_fenced = true;
            if self.is_holding() {
                self.unreadable = eventfd(0, EventfdFlags::CLOEXEC).ok();
            }
            tracing::debug!(policy = ?self.policy, "a target has fenced this host");
        }
        match outcome {
            Err(_) if self.is_holding() => {}
            Err(_) if self.waits_after_fence() => {
                self.done.push_back(Completion { id, outcome: Err(WorkError::Away) });
            }
            outcome => self.done.push_back(Completion { id, outcome }),
        }
    }

    fn fail(&mut self, work: Work, error: WorkError) {
        self.finish(work.id, Err(error));
    }

    /// Whether work waits for the end of this process, because the target has fenced its host.
    fn waits_after_fence(&self) -> bool {
        self.is_fenced && self.after_fence == AfterFence::Wait
    }

    /// Whether work is held until this process ends.
    fn is_holding(&self) -> bool {
        self.waits_after_fence() && self.policy == AwayPolicy::Wait
    }

    /// The endpoint, if it is never replaced: then its work in flight need not be recorded.
    #[inline]
    fn only_endpoint(&mut self) -> Option<&mut dyn Endpoint> {
        match &mut self.state {
            ReconnectState::Connected(endpoint) if self.reconnect.is_none() => Some(&mut **endpoint),
            _ => None,
        }
    }

    /// Takes completions of the current endpoint. Returns true if there were any or the endpoint
    /// is broken.
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
        let matches = |posted: &InFlightWork| !posted.is_unknown && posted.work.id == completion.id;
        let Some(mut at) = self.in_flight.iter().position(matches) else { return };
        match completion.outcome {
            Err(WorkError::PeerGone | WorkError::Timeout | WorkError::Flushed) if !self.is_fenced => {
                self.in_flight[at].is_unknown = true;
            }
            outcome => {
                // Unsignalled work that was posted before is done, too.
                let is_unsignalled = |posted: &InFlightWork| !posted.is_unknown && !posted.work.signalled;
                for before in (0..at).rev() {
                    if is_unsignalled(&self.in_flight[before]) {
                        self.in_flight.remove(before);
                        at -= 1;
                    }
                }
                self.in_flight.remove(at);
                self.finish(completion.id, outcome);
            }
        }
    }

    /// Starts to reconnect. All completions of the endpoint must have been taken.
    fn disconnect(&mut self) {
        let ReconnectState::Connected(endpoint) = &self.state else { return };
        if self.is_fenced {
            self.fail_all(None, WorkError::Fenced);
            return;
        }
        let Some(reconnect) = self.reconnect.clone() else { return };
        let drain = endpoint.drain_handle().map(SharedDrain::new);
        tracing::debug!(in_flight = self.in_flight.len(), "a target is away; reconnecting");
        // The endpoint must be dropped before another is made.
        self.state = ReconnectState::Failed(None, WorkError::PeerGone);
        self.state = Self::start_reconnecting(&reconnect, drain);
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

    /// Takes the result of the reconnector. Returns true if there was one.
    fn poll_reconnector(&mut self) -> bool {
        let ReconnectState::Away(reconnector) = &mut self.state else { return false };
        let Some(found) = reconnector.poll_result() else { return false };
        let ReconnectState::Away(reconnector) =
            std::mem::replace(&mut self.state, ReconnectState::Failed(None, WorkError::PeerGone))
        else {
            return false;
        };
        match found.and_then(|endpoint| self.attach(endpoint).ok_or(WorkError::PeerGone)) {
            Ok(endpoint) => {
                tracing::debug!(waiting = self.waiting.len(), "reconnected to a target");
                self.state = ReconnectState::Connected(endpoint);
                self.post_waiting();
            }
            Err(cause) => self.fail_all(Some(reconnector), cause),
        }
        true
    }

    /// Registers all local memory with a new endpoint. Returns the endpoint if it is to the same
    /// memory and assigns the same local keys.
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

    fn fail_all(&mut self, reconnector: Option<ReconnectAttempts>, cause: WorkError) {
        self.state = ReconnectState::Failed(reconnector, cause);
        let in_flight = std::mem::take(&mut self.in_flight).into_iter().map(|posted| posted.work);
        let left = in_flight.chain(std::mem::take(&mut self.waiting));
        left.for_each(|work| self.fail(work, cause));
    }

    /// Posts waiting work, as far as there is room.
    fn post_waiting(&mut self) {
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            let (first, last) = waiting.as_slices();
            self.post_now(first);
            self.post_now(last);
        }
    }

    /// Posts work behind all waiting work, or queues it if that is not possible now.
    fn post_now(&mut self, batch: &[Work]) {
        let ReconnectState::Connected(endpoint) = &mut self.state else {
            self.waiting.extend(batch);
            return;
        };
        // A broken endpoint is left to `poll_endpoint`, which makes another.
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
        if self.is_holding() {
            return Ok(());
        }
        if let Some(endpoint) = self.only_endpoint() {
            return endpoint.post(batch);
        }
        let depth = self.limits.queue_depth;
        let accepted = batch
            .len()
            .min(depth.saturating_sub(self.in_flight.len() + self.waiting.len() + self.done.len()));
        let posted = &batch[..accepted];
        // With `AwayPolicy::Fail` a caller may never poll or wait.
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
        if let Some(endpoint) = self.only_endpoint() {
            let start = out.len();
            endpoint.poll(out, max);
            if out[start..].iter().any(|ended| ended.outcome.is_err()) {
                let ended = out.split_off(start);
                ended.into_iter().for_each(|ended| self.finish(ended.id, ended.outcome));
                out.extend(self.done.drain(..));
            }
            return out.len() - start;
        }
        while self.done.is_empty() && (self.poll_endpoint() || self.poll_reconnector()) {}
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.done.is_empty() {
            return;
        }
        if self.is_holding() {
            return std::thread::sleep(timeout.min(HOLD_SLEEP_MAX));
        }
        match &mut self.state {
            ReconnectState::Connected(endpoint) => endpoint.wait(timeout),
            ReconnectState::Away(reconnector) => reconnector.wait(timeout),
            ReconnectState::Failed(..) => {}
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if self.is_holding() {
            return self.unreadable.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        }
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
        // Providers number local keys from one, so that another endpoint assigns the same keys.
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
        let is_broken = match &self.state {
            ReconnectState::Connected(endpoint) => self.reconnect.is_none() && endpoint.is_broken(),
            ReconnectState::Away(_) => false,
            ReconnectState::Failed(..) => true,
        };
        is_broken && !self.waits_after_fence()
    }

    fn is_away(&self) -> bool {
        self.waits_after_fence() || matches!(self.state, ReconnectState::Away(_))
    }

    fn treat_as_away(&mut self) {
        if self.policy == AwayPolicy::Fail && self.reconnect.is_some() {
            while self.poll_endpoint() {}
            self.disconnect();
        }
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
