//! Memory is reused only when no thread can access its old contents.

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::thread;

use crate::epochs::Epochs;

const SCHEDULES: usize = 2000;
const PLACES: usize = 3;
const READERS: usize = 2;

#[derive(Debug)]
struct Model {
    epochs: Epochs,
    /// The place that readers find.
    published: AtomicUsize,
    is_free: [AtomicBool; PLACES],
}

fn play(waits: bool) {
    let model = Arc::new(Model {
        epochs: Epochs::new(READERS + 1),
        published: AtomicUsize::new(0),
        is_free: std::array::from_fn(|place| AtomicBool::new(place > 0)),
    });
    let readers = (0..READERS).map(|reader| {
        let model = Arc::clone(&model);
        thread::spawn(move || {
            for _ in 0..3 {
                let _pin = model.epochs.pin(reader);
                let place = model.published.load(Ordering::SeqCst);
                for _ in 0..2 {
                    assert!(!model.is_free[place].load(Ordering::SeqCst), "place {place} was reused");
                }
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    for step in 1..=4 {
        let place = step % PLACES;
        model.is_free[place].store(false, Ordering::SeqCst);
        let old = model.published.swap(place, Ordering::SeqCst);
        let retired = model.epochs.retire();
        while waits && model.epochs.oldest() <= retired {
            thread::yield_now();
        }
        model.is_free[old].store(true, Ordering::SeqCst);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn no_reader_sees_reused_memory() {
    shuttle::check_random(|| play(true), SCHEDULES);
}

#[test]
fn memory_that_is_reused_at_once_is_detected() {
    let outcome = std::panic::catch_unwind(|| shuttle::check_random(|| play(false), SCHEDULES));
    assert!(outcome.is_err());
}
