//! The listener: a thread per connection, up to a limit, and a clean stop.

use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connection::{Connection, Incoming};
use super::message::{Limits, Request, RequestError, Response};

/// What answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request. `client_is_gone` says whether waiting for the answer still makes sense.
    fn answer(&self, request: &Request, client_is_gone: &dyn Fn() -> bool) -> Response;

    /// Answers a request that can't be read.
    fn unreadable(&self, error: &RequestError) -> Response;

    /// Answers a connection beyond the limit.
    fn overloaded(&self) -> Response;

    /// Answers a request whose handler panicked.
    fn panicked(&self) -> Response;
}

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServerConfig {
    /// Sizes of a request.
    pub limits: Limits,
    /// Open connections, hence threads.
    pub max_connections: usize,
}

/// Connections beyond the limit that are told so at one time; more are closed without a word.
const MAX_REFUSALS: usize = 32;

/// A running server. Dropping it stops it at once.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    stopping: AtomicBool,
    open: AtomicUsize,
}

impl Server {
    /// Binds `address` and serves it from a thread of its own.
    ///
    /// # Errors
    /// If the address can't be bound.
    pub fn start(
        address: impl ToSocketAddrs,
        config: ServerConfig,
        handler: Arc<dyn Handler>,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = Arc::new(State::default());
        let shared = state.clone();
        let accept = move || accept(&listener, config, &handler, &shared);
        let acceptor = std::thread::Builder::new().name("accept".to_string()).spawn(accept)?;
        Ok(Self { address, state, acceptor: Some(acceptor) })
    }

    /// The bound address, with the port that was given for port 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more connections, lets requests under way end for up to `grace`, and says how many were still open then.
    pub fn stop(&mut self, grace: Duration) -> usize {
        self.stop_accepting();
        let deadline = Instant::now() + grace;
        while self.state.open.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.state.open.load(Ordering::SeqCst)
    }

    fn stop_accepting(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        if let Some(acceptor) = self.acceptor.take() {
            // The acceptor sleeps in accept(): a connection wakes it.
            if TcpStream::connect(self.address).is_ok() {
                let _ = acceptor.join();
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

/// One open connection, counted as long as it lives.
struct Counted(Arc<State>);

impl Counted {
    fn new(state: &Arc<State>) -> Self {
        state.open.fetch_add(1, Ordering::SeqCst);
        Self(state.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn accept(listener: &TcpListener, config: ServerConfig, handler: &Arc<dyn Handler>, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else {
            // Out of file descriptors, most likely: give connections time to close.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let over = state.open.load(Ordering::SeqCst).checked_sub(config.max_connections);
        if over.is_some_and(|over| over >= MAX_REFUSALS) {
            continue;
        }
        let counted = Counted::new(state);
        let (handler, stopping) = (handler.clone(), state.clone());
        let serve = move || {
            let _counted = counted;
            let Ok(mut connection) = Connection::new(stream, config.limits) else { return };
            match over {
                Some(_) => connection.send_last(&handler.overloaded()),
                None => serve(connection, handler.as_ref(), &|| stopping.stopping.load(Ordering::SeqCst)),
            }
        };
        // Without a thread the connection is dropped, which the client sees.
        let _ = std::thread::Builder::new().name("connection".to_string()).spawn(serve);
    }
}

fn serve(mut connection: Connection, handler: &dyn Handler, stopping: &dyn Fn() -> bool) {
    loop {
        let request = match connection.next(stopping) {
            Incoming::Request(request) => request,
            Incoming::Bad(error) => return connection.send_last(&handler.unreadable(&error)),
            Incoming::End => return,
        };
        let answer = || handler.answer(&request, &|| connection.client_is_gone());
        // A panic is a bug of one request, and must not take the connection's client down without an answer.
        let response = catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| handler.panicked());
        let close = request.close || stopping();
        if connection.send(&response, close, request.method == "HEAD").is_err() || close {
            return;
        }
    }
}
