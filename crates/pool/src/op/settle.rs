//! A span that rests is closed for good.

use aquifer_fabric::Host;

use super::give::{Gift, Give, Given};
use super::{Machine, Step, StepResult};
use crate::cache::NodeCache;

/// Ends the life of a span, if it rests (F7, F4, F6). Dropped before it is done it may have left it closed, and nobody the wiser.
#[derive(Clone, Debug)]
pub struct SettleOp {
    host: Host,
    span: u32,
    giving: Option<Give>,
}

impl SettleOp {
    /// For a client of `host`.
    #[must_use]
    pub const fn new(host: Host, span: u32) -> Self {
        Self { host, span, giving: None }
    }
}

impl Machine for SettleOp {
    type Output = ();

    fn start(&mut self, cache: &mut NodeCache) -> Step<()> {
        if !cache.is_resting(self.span) {
            return Step::Done(Ok(()));
        }
        let gift = Gift::Span { span: self.span };
        let (give, action) = Give::begin(self.host, gift, 0, cache);
        self.giving = Some(give);
        Step::Post(action)
    }

    fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Step<()> {
        let mut give = self.giving.take().expect("an action is under way");
        match give.step(cache, result) {
            Ok(Given::Post(action)) => {
                self.giving = Some(give);
                Step::Post(action)
            }
            // Whoever has changed the word in between has signed it.
            Ok(Given::Done | Given::Overtaken) => Step::Done(Ok(())),
            Err(error) => Step::Done(Err(error)),
        }
    }
}
