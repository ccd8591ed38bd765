//! Mutations: protocol steps that a test breaks on purpose, to show that its simulator notices.
//!
//! A protocol lists its mutations with [`mutations!`] and checks `is_active` at the step.
//! In a build without debug assertions the answer is the constant false, so the shipped binary
//! contains no mutation.

#![forbid(unsafe_code)]

use std::fmt::Debug;

/// The mutations of one protocol.
pub trait Mutations: Copy + PartialEq + Debug + 'static {
    /// All mutations of the protocol.
    const ALL: &'static [Self];

    /// Replaces the mutation that is active on this thread; returns the previous one.
    fn replace_active(next: Option<Self>) -> Option<Self>;

    /// Runs `work` with this step broken on the calling thread.
    ///
    /// # Panics
    /// In a build without debug assertions, where the step cannot be broken; and if `work` does.
    fn while_active<T>(self, work: impl FnOnce() -> T) -> T {
        if cfg!(not(debug_assertions)) {
            panic!("mutations need a build with debug assertions");
        }
        let _restore = Restore(Self::replace_active(Some(self)));
        work()
    }
}

/// Restores the previous mutation when `work` returns or panics.
struct Restore<M: Mutations>(Option<M>);

impl<M: Mutations> Drop for Restore<M> {
    fn drop(&mut self) {
        M::replace_active(self.0);
    }
}

/// Declares `enum Mutation` with one variant for each step that can be broken.
#[macro_export]
macro_rules! mutations {
    ($(#[$about:meta])* pub enum Mutation { $($(#[$step:meta])* $variant:ident,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Mutation {
            $($(#[$step])* $variant,)*
        }

        thread_local! {
            static ACTIVE_MUTATION: ::std::cell::Cell<Option<Mutation>> =
                const { ::std::cell::Cell::new(None) };
        }

        impl $crate::Mutations for Mutation {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];

            fn replace_active(next: Option<Self>) -> Option<Self> {
                ACTIVE_MUTATION.replace(next)
            }
        }

        impl Mutation {
            /// Whether the calling thread runs with this step broken. Always false without debug
            /// assertions.
            #[inline]
            #[must_use]
            pub fn is_active(self) -> bool {
                cfg!(debug_assertions) && ACTIVE_MUTATION.get() == Some(self)
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::Mutations;

    mutations! {
        /// Two steps.
        pub enum Mutation {
            /// The first.
            SkipFirst,
            /// The second.
            SkipSecond,
        }
    }

    #[test]
    fn a_mutation_is_active_only_on_its_thread_and_during_its_call() {
        assert_eq!(Mutation::ALL, [Mutation::SkipFirst, Mutation::SkipSecond]);
        Mutation::SkipFirst.while_active(|| {
            assert!(Mutation::SkipFirst.is_active());
            assert!(!Mutation::SkipSecond.is_active());
            std::thread::spawn(|| assert!(!Mutation::SkipFirst.is_active())).join().unwrap();
        });
        assert!(!Mutation::SkipFirst.is_active());
    }

    #[test]
    fn a_panic_deactivates_the_mutation() {
        let panic = std::panic::catch_unwind(|| Mutation::SkipSecond.while_active(|| panic!("noticed")));
        assert!(panic.is_err());
        assert!(!Mutation::SkipSecond.is_active());
    }
}
