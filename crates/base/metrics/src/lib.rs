//! Serves a daemon's metrics over HTTP: in the OpenMetrics text format for collectors that accept
//! it, such as Prometheus, and in the older Prometheus format for all others.
//!
//! - [`address`]: the address of the server; only this machine can connect, because the server has
//!   no authentication.
//! - [`server`]: the HTTP server, on its own thread.
//! - [`mod@write`]: encodes families of metrics, for a [`Collector`].

#![forbid(unsafe_code)]

pub mod address;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
mod mutation;
mod plain;
pub mod server;
pub mod write;

pub use address::{MetricsAddress, MetricsAddressError};
pub use mutation::Mutation;
pub use prometheus_client::collector::Collector;
pub use prometheus_client::encoding::DescriptorEncoder;
pub use prometheus_client::registry::{Registry, Unit};
pub use server::{MetricsError, MetricsListener, MetricsServer};
