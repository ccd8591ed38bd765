//! What a daemon counts, in the text that Prometheus reads, over HTTP.
//!
//! - [`place`]: where it is served: this machine alone may ask, since nobody is asked who he is.
//! - [`server`]: the HTTP server, on a thread of its own.
//! - [`write`]: families of figures, as a [`Collector`] gives them when it is asked.

#![forbid(unsafe_code)]

pub mod place;
pub mod server;
pub mod write;

pub use place::{Place, PlaceError};
pub use prometheus_client::collector::Collector;
pub use prometheus_client::encoding::DescriptorEncoder;
pub use prometheus_client::registry::{Registry, Unit};
pub use server::{Listener, MetricsError, Server};
