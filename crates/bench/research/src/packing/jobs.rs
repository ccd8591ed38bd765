//! Random batch jobs: run time, peak memory, and use of memory over time.

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;

/// Pages of 1 MiB.
const MIB_PAGES: u64 = 256;
/// Log-normal distribution of the peaks in pages: median, sigma, and bounds.
const PEAK_PAGES: (f64, f64, u64, u64) = (65_536.0, 0.6, 64 * MIB_PAGES, 1024 * MIB_PAGES);
/// Log-normal distribution of the run times in seconds: median, sigma, and bounds.
const TIME_S: (f64, f64, u64, u64) = (600.0, 0.7, 120, 3600);

/// Use of memory over a job's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// Grows evenly from a tenth to the peak: a job that collects a result.
    Ramp,
    /// Grows to the peak in the first tenth, then uses nine tenths of it: a job that loads data and
    /// works.
    Plateau,
    /// Uses a third of the peak, and five times the peak, for a quarter of the time in all: stages
    /// with shuffles.
    Spikes,
    /// Grows to the peak in the first fifth, then uses a quarter: a job that reads much and keeps
    /// little.
    Idle,
}

impl Shape {
    /// All shapes.
    pub const ALL: [Self; 4] = [Self::Ramp, Self::Plateau, Self::Spikes, Self::Idle];

    /// Used part of the peak after a part of the run time.
    pub fn used(self, life: f64) -> f64 {
        match self {
            Self::Ramp => 0.1 + 0.9 * life,
            Self::Plateau if life < 0.1 => life / 0.1,
            Self::Plateau => 0.9,
            Self::Spikes if (0.625..0.875).contains(&(life * 5.0).fract()) => 1.0,
            Self::Spikes => 1.0 / 3.0,
            Self::Idle if life < 0.2 => life / 0.2,
            Self::Idle => 0.25,
        }
    }
}

/// Percentages of the shapes, in the order of [`Shape::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mix {
    /// Name in the report.
    pub name: &'static str,
    percent: [u64; 4],
}

impl Mix {
    /// The mixes: all shapes; mostly even use; mostly rare peaks.
    pub const ALL: [Self; 3] = [
        Self { name: "mixed", percent: [30, 30, 25, 15] },
        Self { name: "level", percent: [15, 70, 10, 5] },
        Self { name: "uneven", percent: [20, 10, 40, 30] },
    ];

    fn draw(self, random: &mut Random) -> Shape {
        let mut left = random.word_below(100);
        for (shape, percent) in Shape::ALL.into_iter().zip(self.percent) {
            if left < percent {
                return shape;
            }
            left -= percent;
        }
        Shape::Idle
    }
}

/// A job.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Job {
    /// Use of its memory.
    pub shape: Shape,
    /// Peak memory in pages, which the job declares.
    pub peak_pages: u64,
    /// Run time without stalls.
    pub time_s: u64,
}

impl Job {
    /// Draws a job of a mix.
    pub fn draw(mix: Mix, random: &mut Random) -> Self {
        Self {
            shape: mix.draw(random),
            peak_pages: lognormal(random, PEAK_PAGES),
            time_s: lognormal(random, TIME_S),
        }
    }

    /// Local memory: half of the peak.
    pub fn local_pages(&self) -> u64 {
        self.peak_pages / 2
    }

    /// Most pages that the job swaps out.
    pub fn remote_pages_max(&self) -> u64 {
        self.peak_pages - self.local_pages()
    }

    /// Pages that are swapped out after a run time.
    pub fn remote_pages(&self, ran_s: u64) -> u64 {
        let life = float(ran_s.min(self.time_s)) / float(self.time_s);
        let used = whole(self.shape.used(life) * float(self.peak_pages)).min(self.peak_pages);
        used.saturating_sub(self.local_pages())
    }

    /// Mean of the swapped pages over the run time ÷ their maximum.
    pub fn mean_to_max(&self) -> f64 {
        let steps = 200;
        let at = |step: u64| float(self.remote_pages(self.time_s * step / steps));
        (0..steps).map(at).sum::<f64>() / float(steps) / float(self.remote_pages_max())
    }
}

/// A random number above 0, and at most 1.
fn part(random: &mut Random) -> f64 {
    (float(random.word() >> 12) + 0.5) / float(1 << 52)
}

/// A log-normal number within bounds (Box-Muller transform).
fn lognormal(random: &mut Random, (median, sigma, least, most): (f64, f64, u64, u64)) -> u64 {
    let normal = (-2.0 * part(random).ln()).sqrt() * (std::f64::consts::TAU * part(random)).cos();
    whole(median * (sigma * normal).exp()).clamp(least, most)
}

/// The number rounded down; 0 if it is negative.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "pages and seconds, far below 2^52"
)]
pub fn whole(value: f64) -> u64 {
    value.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stay_within_the_peak_and_reach_it() {
        for shape in Shape::ALL {
            let used: Vec<f64> = (0..=1000).map(|step| shape.used(f64::from(step) / 1000.0)).collect();
            assert!(used.iter().all(|used| (0.0..=1.0).contains(used)), "{shape:?}");
            let most = used.iter().copied().fold(0.0, f64::max);
            assert!(most > 0.89, "{shape:?} reaches {most}");
        }
    }

    #[test]
    fn spikes_take_a_quarter_of_the_time() {
        let high = (0..1000).filter(|step| Shape::Spikes.used(f64::from(*step) / 1000.0) > 0.9).count();
        assert!((230..=270).contains(&high), "{high}");
    }

    #[test]
    fn jobs_are_the_same_for_the_same_seed_and_within_bounds() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..500).map(|_| Job::draw(Mix::ALL[0], &mut random)).collect::<Vec<Job>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        for job in draw(5) {
            assert!((64 * MIB_PAGES..=1024 * MIB_PAGES).contains(&job.peak_pages));
            assert!((120..=3600).contains(&job.time_s));
            assert!((0..=job.time_s).all(|ran| job.remote_pages(ran) <= job.remote_pages_max()));
            assert!((0.0..=1.0).contains(&job.mean_to_max()));
        }
    }

    #[test]
    fn a_mix_is_what_it_says() {
        for mix in Mix::ALL {
            assert_eq!(mix.percent.iter().sum::<u64>(), 100);
            let mut random = Random::new(9);
            let ramps = (0..10_000).filter(|_| mix.draw(&mut random) == Shape::Ramp).count();
            assert!(ramps.abs_diff(usize::try_from(mix.percent[0] * 100).unwrap()) < 200, "{mix:?}: {ramps}");
        }
    }
}
