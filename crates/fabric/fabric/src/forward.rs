//! A macro for endpoints that wrap another endpoint.

/// Implements methods of [`Endpoint`](crate::Endpoint) by calls of the endpoint in a field:
/// `forward_endpoint!(inner: poll, wait);`
#[macro_export]
macro_rules! forward_endpoint {
    ($inner:ident: $($method:ident),+) => { $($crate::forward_endpoint!(@$method $inner);)+ };
    (@poll $inner:ident) => {
        fn poll(&mut self, out: &mut Vec<$crate::Completion>, max: usize) -> usize {
            self.$inner.poll(out, max)
        }
    };
    (@wait $inner:ident) => {
        fn wait(&mut self, timeout: std::time::Duration) {
            self.$inner.wait(timeout);
        }
    };
    (@poll_fd $inner:ident) => {
        fn poll_fd(&self) -> Option<$crate::PollFd<'_>> {
            self.$inner.poll_fd()
        }
    };
    (@register_local $inner:ident) => {
        fn register_local(
            &mut self,
            memory: std::sync::Arc<$crate::Memory>,
        ) -> Result<$crate::LocalKey, $crate::EndpointError> {
            self.$inner.register_local(memory)
        }
    };
    (@receive $inner:ident) => {
        fn receive(&mut self, out: &mut Vec<u8>) -> bool {
            self.$inner.receive(out)
        }
    };
    (@regions $inner:ident) => {
        fn regions(&self) -> &[$crate::Region] {
            self.$inner.regions()
        }
    };
    (@limits $inner:ident) => {
        fn limits(&self) -> $crate::Limits {
            self.$inner.limits()
        }
    };
    (@drain_handle $inner:ident) => {
        fn drain_handle(&self) -> Option<Box<dyn $crate::DrainHandle>> {
            self.$inner.drain_handle()
        }
    };
    (@is_away $inner:ident) => {
        fn is_away(&self) -> bool {
            self.$inner.is_away()
        }
    };
    (@treat_as_away $inner:ident) => {
        fn treat_as_away(&mut self) {
            self.$inner.treat_as_away();
        }
    };
    (@is_broken $inner:ident) => {
        fn is_broken(&self) -> bool {
            self.$inner.is_broken()
        }
    };
}
