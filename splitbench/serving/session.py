class Owner:
    text='1:1'
    @classmethod
    def current(cls): return cls()
def end_session(say): pass
